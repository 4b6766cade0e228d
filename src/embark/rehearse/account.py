"""Rehearses the rendered scripts in a simulated cloud account, which the distribution `embark-cloudsim` provides."""

from collections.abc import Callable, Sequence

from embark.errors import MissingPackage
from embark.values import frozen


@frozen
class StepResult:
    """The result of a step, with the command that a program refused if one did."""

    title: str
    is_ok: bool
    num_commands: int
    output: str
    command: str = ""
    error: str = ""


@frozen
class AccountRehearsal:
    """All steps from an empty account to a trained or served model and back."""

    cloud: str
    target: str
    steps: tuple[StepResult, ...]
    paid: tuple[str, ...]  # Resources that still cost money at the end.
    assumed: tuple[str, ...]
    not_modelled: tuple[str, ...]
    elapsed_s: float  # Measured by the account's clock.

    @property
    def is_ok(self) -> bool:
        return all(step.is_ok for step in self.steps) and not self.paid


def rehearse_account(spec: str, settings: Sequence[str], on_step: Callable[[StepResult], None]) -> AccountRehearsal:
    """Render a spec and run its scripts in a simulated account; the first step that fails ends the rehearsal."""
    try:
        from .account_scripts import rehearse_scripts
    except ModuleNotFoundError as error:
        raise MissingPackage(f"embark rehearse --account needs {error.name}, which is not installed",
                             "pip install 'embark-rec[account]'") from error
    return rehearse_scripts(spec, settings, on_step)
