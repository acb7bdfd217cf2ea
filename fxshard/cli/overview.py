"""The commands, and what each is for."""

# What each is for; their files have their arguments, and need torch.
COMMANDS = {
    "report": "memory of one rank, from the program alone",
    "explain": "where the peak is, and what is alive there",
    "explain-oom": "who held GPU memory when a program ran out of it, from the snapshot it left",
    "fsdp2": "memory of one rank under torch's own FSDP2, from a dry run",
    "dryrun": "memory of one rank of a script of your own, from its first steps without a GPU",
    "fits": "exit with 0 if a rank's peak is within a budget",
    "solve": "the largest batch or sequence, or the fewest ranks, that fit a budget",
    "check": "a gate for CI: jobs of a file beside their budgets and their recorded bytes",
    "diff": "two reports side by side",
    "dump": "the schedule, the graph, the code, or the program as text that is read back",
    "opt": "run passes over the text of a program",
    "estimate": "seconds of a step on a GPU, from constants",
    "tune": "the fastest configuration that fits, and why the others lost",
    "validate": "run ranks under a tracker; compare with the report and with eager PyTorch",
}
