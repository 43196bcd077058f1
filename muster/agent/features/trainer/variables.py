"""The variable by which workers give the Trainer its callback."""

from contextlib import ExitStack

from muster._shared.contract import Env
from muster._shared.records import replace
from muster.agent.config import AgentConfig


def add_variables(config: AgentConfig, _stack: ExitStack) -> AgentConfig:
    """Have `inject` called once the script has imported the Trainer."""
    hook = "transformers.trainer=muster.integrations.huggingface"
    return replace(config, base_env={**config.base_env, Env.IMPORT_HOOK: hook})
