"""Of torch.distributed.fsdp.fully_shard: torch's test/distributed/_composable/fsdp/."""
