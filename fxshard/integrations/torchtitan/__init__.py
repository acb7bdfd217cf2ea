"""torchtitan's models sharded by fxshard: an experiment as torchtitan's own are, of torchtitan 0.2.

Importing this registers the models `fxshard.llama3` and `fxshard.qwen3`. torchtitan does it for
``--experimental.custom_import fxshard.integrations.torchtitan --model.name fxshard.llama3``.
"""

from torchtitan.protocols.train_spec import register_train_spec

from fxshard.integrations.torchtitan import llama3, qwen3

register_train_spec("fxshard.llama3", llama3.get_train_spec())
register_train_spec("fxshard.qwen3", qwen3.get_train_spec())
