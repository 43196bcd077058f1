"""`--trainer-callback`: when a script's Trainer gets the callback, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from muster.agent.cli.arguments import parse_args
from muster.agent.errors import UsageError

FLAG = "--trainer-callback"


@pytest.mark.parametrize(
    ("words", "installed", "told"),
    [
        ([FLAG, "--no-python", "train.sh"], True, "--trainer-callback needs a Python script or module"),
        ([FLAG, "train.py"], False, "--trainer-callback: transformers is not installed"),
    ],
)
def test_what_cannot_have_it_is_refused(words, installed: bool, told: str, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if installed else None)
    with pytest.raises(UsageError) as raised:
        parse_args(words, {})
    assert str(raised.value) == told


class Fake:
    """A Trainer."""

    def __init__(self, *callbacks: object, fp16: bool = False) -> None:
        self.args, self.model = SimpleNamespace(fp16=fp16), SimpleNamespace()
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.add_callback = self.callback_handler.callbacks.append

    def train(self, resume_from_checkpoint: str | None = None, trial: object = None) -> object:
        return resume_from_checkpoint, trial


@pytest.fixture
def trainer(monkeypatch) -> Any:
    """The class, as a script finds it with the flag."""
    pytest.importorskip("transformers")
    from muster.integrations import huggingface

    monkeypatch.setattr(Fake, "train", Fake.train)  # set back afterwards
    huggingface.inject(SimpleNamespace(Trainer=Fake))
    return Fake


@pytest.mark.torch
@pytest.mark.parametrize("fp16", [False, True])
def test_one_that_trains_has_it_and_trains_as_told(trainer, fp16: bool) -> None:
    made = trainer(fp16=fp16)
    assert made.train("here", trial=3) == ("here", 3), "without muster there is nothing to resume from"
    [callback] = made.callback_handler.callbacks
    assert callback._keep_every == (0 if fp16 else 1)


@pytest.mark.torch
def test_a_second_train_and_a_callback_of_the_script_are_refused(trainer) -> None:
    trainer().train()
    with pytest.raises(RuntimeError, match=r"--trainer-callback: train\(\) is called a second time"):
        trainer().train()
    from muster.integrations.huggingface import MusterCallback

    with pytest.raises(RuntimeError, match="has given its Trainer a MusterCallback already"):
        trainer(MusterCallback()).train()
