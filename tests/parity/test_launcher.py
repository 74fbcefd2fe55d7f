"""Which launcher is found in which variables, and what does not fit it."""

from __future__ import annotations

import pytest

from hyper_parallel.parity.launcher import Launch, LaunchError, check_device, check_launch, detect_launch

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "2", "RANK_ID": "2"}
TORCHRUN = Launch("torchrun", "torch", 8, 3)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "a", "RANK_ID": "0"}, None),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x"}, TORCHRUN),
        (TORCH, Launch("RANK and WORLD_SIZE", "torch", 8, 3)),
        (WORKER, Launch("msrun", "mindspore", 4, 2)),
        # On several nodes without --node_rank, RANK_ID is what the scheduler's process has left there.
        (
            {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "RANK_ID": "0"},
            Launch("msrun", "mindspore", 4, None),
        ),
        (
            {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "4", "RANK_ID": "0"},
            Launch("msrun", "mindspore", 4, None, scheduler=True),
        ),
    ],
)
def test_detects(environment: dict[str, str], found: Launch | None) -> None:
    assert detect_launch(environment) == found


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCH, **WORKER}, "both torchrun's variables .* and msrun's"),
        # Each task of a batch system would run the whole suite by itself.
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK and WORLD_SIZE set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
        ),
        (
            {name: TORCH[name] for name in TORCH if name != "RANK"},
            "WORLD_SIZE set, but not RANK: .* unset WORLD_SIZE",
        ),
        ({**TORCH, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({**TORCH, "RANK": "-1"}, "RANK='-1' is no number"),
        ({"MS_ROLE": "MS_WORKER"}, "MS_WORKER_NUM='' is no number"),
    ],
)
def test_variables_of_no_launcher_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect_launch(environment)


def test_without_a_launcher_the_two_frameworks_are_on_the_cpu() -> None:
    check_device("cpu", ("torch", "mindspore"))
    check_device("tpu", ("third_party",))
    with pytest.raises(
        LaunchError, match="the ranks of torch are on the cpu; for cuda start this command with torchrun"
    ):
        check_device("cuda", ("torch", "third_party"))


@pytest.mark.parametrize(
    ("platforms", "sizes", "environment", "platform"),
    [
        ((), (), {}, "torch"),
        (("torch",), (8,), {"HYPER_PARALLEL_PLATFORM": "torch"}, "torch"),
        (("third_party",), (), {}, "third_party"),
        ((), (), {"HYPER_PARALLEL_PLATFORM": "third_party"}, "third_party"),
    ],
)
def test_takes_the_platform_that_fits(
    platforms: tuple[str, ...], sizes: tuple[int, ...], environment: dict[str, str], platform: str
) -> None:
    assert check_launch(TORCHRUN, platforms, sizes, environment) == Launch("torchrun", platform, 8, 3)


@pytest.mark.parametrize(
    ("platforms", "sizes", "environment", "message"),
    [
        (("mindspore",), (), {}, "run torch, but .* asks for mindspore"),
        (("torch", "mindspore"), (), {}, "asks for mindspore, torch"),
        (("torch",), (), {"HYPER_PARALLEL_PLATFORM": "mindspore"}, "asks for mindspore, torch"),
        ((), (4,), {}, "torchrun has started 8 ranks, .* leave out --world-sizes 4"),
        ((), (8, 4), {}, "leave out --world-sizes 8 4"),
    ],
)
def test_refuses(
    platforms: tuple[str, ...], sizes: tuple[int, ...], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        check_launch(TORCHRUN, platforms, sizes, environment)
