"""What a user can do: ``./inv TASK`` or ``invoke TASK``. Each is a docstring and one call into app/host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from invoke import Context, Exit, task

from app.errors import Fault
from app.host import compare as comparison
from app.host import images, locks, programs, testing
from app.host.doctor import diagnose, smoke_arguments
from app.host.variants import choose_several
from app.smoke.explain import main as explain_file


def told(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """A task that tells a user's Fault in one line and ends with its exit code; ``settings`` are Invoke's."""
    if function is None:
        return functools.partial(told, **settings)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Fault as fault:
            raise Exit(f"error: {fault}", fault.code) from None

    return task(wrapped, **settings)


def behind_dashes() -> list[str]:
    """The words behind ``--`` on this command line, as they were typed."""
    return programs.remainder(sys.argv)


@told
def build(context: Context, cuda: str = "", base: str = "", no_cache: bool = False) -> None:
    """Build and prove the image of a variant (--cuda 12.1, 'all'), from --base registry, local or IMAGE."""
    images.build(choose_several(cuda), base_choice=base or None, no_cache=no_cache)


@told
def train(context: Context, cuda: str = "", runtime: str = "auto") -> None:
    """Train: ./inv train -- TRAINER ARGUMENTS; --runtime auto, docker or venv."""
    programs.run("train", behind_dashes(), cuda, runtime)


@told
def predict(context: Context, cuda: str = "", runtime: str = "auto") -> None:
    """Let a trained model label or score files: ./inv predict -- PREDICT ARGUMENTS."""
    programs.run("predict", behind_dashes(), cuda, runtime)


@told
def bench(context: Context, cuda: str = "", runtime: str = "auto") -> None:
    """Measure training and prediction here beside Hugging Face's: ./inv bench -- --json FILE; minutes."""
    programs.run("bench", behind_dashes(), cuda, runtime)


@told
def smoke(
    context: Context, cuda: str = "", gpus: str = "auto", json: str = "", sweep: bool = False, runtime: str = "auto"
) -> None:
    """Check where training runs what it needs: GPUs, links, NCCL, container; --gpus auto or N, --json FILE, --sweep."""
    programs.run("smoke", smoke_arguments(gpus, json, sweep), cuda, runtime)


@told
def doctor(context: Context, cuda: str = "", record: str = "", from_: str = "", json: str = "") -> None:
    """Check this host and say which variant to build; --record DIR keeps what was read, --from DIR judges that."""
    raise Exit(code=diagnose(cuda, record, from_, json))


@told
def explain(context: Context, file: str) -> None:
    """Name the cause of a failure from a log FILE, and the next command."""
    raise Exit(code=explain_file([file]))


@told(iterable=["cuda"])
def compare(context: Context, cuda: list[str], runtime: str = "auto", tolerance: float = 0.01) -> None:
    """The same training in several variants: ./inv compare --cuda 11.7 --cuda 12.1 -- TRAINER ARGUMENTS."""
    raise Exit(code=comparison.compare(cuda, behind_dashes(), runtime, tolerance))


@told
def lock(context: Context, cuda: str = "") -> None:
    """Resolve pinned/CUDA/requirements.in to a lock with hashes (--cuda 12.1, tools, 'all')."""
    locks.lock(cuda)


@told
def verify(context: Context, cuda: str = "") -> None:
    """Prove an image that is there: every import, every version, a training step."""
    images.verify(choose_several(cuda))


@told
def shell(context: Context, cuda: str = "", runtime: str = "auto") -> None:
    """Open a shell inside the environment of a variant."""
    programs.shell(cuda, runtime)


@told
def test(context: Context, cuda: str = "", runtime: str = "auto", long: bool = False) -> None:
    """Lint, type-check and test: the host side here, the rest inside the environment; --long runs the long ones too."""
    testing.run(cuda, runtime, long, behind_dashes())
