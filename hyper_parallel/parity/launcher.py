"""Which launcher, if any, has started this process, by the variables that it sets.

On a launcher's ranks the suite runs as it is: it starts none of its own. Only names of variables that frameworks
document are read here, so that no framework has to be imported to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(ValueError):
    """What the launcher says does not fit what was asked for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher told this process.

    ``rank`` is None where the framework assigns it while the ranks join; ``scheduler`` marks the process that only
    brings them together.
    """

    launcher: str
    platform: str
    world_size: int
    rank: int | None
    scheduler: bool = False


_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Of these one says that this process is one of several.
_ONE_OF_SEVERAL = ("RANK", "WORLD_SIZE")
FRAMEWORKS = ("torch", "mindspore")


def detect_launch(environment: Mapping[str, str]) -> Launch | None:
    """What started this process; None if it was no launcher.

    torchrun is known by its variables, which other launchers for torch set, too, and msrun by ``MS_ROLE``.

    Raises:
        LaunchError: both are there, or a job's variables in part.
    """
    torch = all(name in environment for name in _TORCH_VARIABLES)
    mindspore = "MS_ROLE" in environment
    if torch and mindspore:
        raise LaunchError(
            "both torchrun's variables (RANK, WORLD_SIZE) and msrun's (MS_ROLE) are set: unset those of one"
        )
    if torch:
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
        return Launch(name, "torch", _number(environment, "WORLD_SIZE"), _number(environment, "RANK"))
    if mindspore:
        # Without a node's rank msrun leaves numbering to the scheduler, and RANK_ID says nothing.
        rank = _number(environment, "RANK_ID") if "MS_NODE_ID" in environment else None
        scheduler = environment["MS_ROLE"] == "MS_SCHED"
        return Launch("msrun", "mindspore", _number(environment, "MS_WORKER_NUM"), rank, scheduler)
    if present := [name for name in _ONE_OF_SEVERAL if name in environment]:
        absent = ", ".join(name for name in _TORCH_VARIABLES if name not in environment)
        # Each process of the job would start ranks of its own, and write the same report.
        raise LaunchError(
            f"{' and '.join(present)} set, but not {absent}: start with torchrun, which sets all, or unset {' '.join(present)}"
        )
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise LaunchError(f"{name}={value!r} is no number: a launcher sets it")
    return int(value)


def check_device(device_type: str, platforms: tuple[str, ...]) -> None:
    """Check that ranks which no launcher has started can compute on the device.

    Raises:
        LaunchError: they cannot.
    """
    if device_type != "cpu" and (names := [name for name in platforms if name in FRAMEWORKS]):
        raise LaunchError(
            f"without a launcher the ranks of {' and '.join(names)} are on the cpu; for {device_type} start this command "
            "with torchrun or msrun (see --help)"
        )


def check_launch(
    launch: Launch, platforms: tuple[str, ...], world_sizes: tuple[int, ...], environment: Mapping[str, str]
) -> Launch:
    """The launch with the platform asked for, after checking that options and variables fit it.

    A third party's platform may run on torchrun's or msrun's ranks; the other framework cannot.

    Raises:
        LaunchError: they do not.
    """
    asked = {*platforms, *filter(None, [environment.get("HYPER_PARALLEL_PLATFORM")])} or {launch.platform}
    others = set(FRAMEWORKS) - {launch.platform}
    if len(asked) > 1 or asked & others:
        raise LaunchError(
            f"the ranks of {launch.launcher} run {launch.platform}, but --platforms or HYPER_PARALLEL_PLATFORM asks "
            f"for {', '.join(sorted(asked))}"
        )
    if world_sizes and set(world_sizes) != {launch.world_size}:
        given = " ".join(map(str, world_sizes))
        raise LaunchError(
            f"{launch.launcher} has started {launch.world_size} ranks, and the cases are for as many: "
            f"leave out --world-sizes {given}"
        )
    (platform,) = asked
    return Launch(launch.launcher, platform, launch.world_size, launch.rank, launch.scheduler)
