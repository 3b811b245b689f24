"""Steps of a tile of the forward that a warpgroup skips, as its queries see none of their keys."""

from __future__ import annotations

from typing import Any

import tilelang.language as T


@T.macro
def skip_keys(w, K, ping_pong, first_step, steps):
    """Release K of steps that a warpgroup skips, and pass its turns at the tensor cores on."""
    for i in T.serial(steps):
        K.wait(first_step + i)
        ping_pong.wait(w)
        ping_pong.pass_on(w)
        K.release(first_step + i)


@T.macro
def skip_values(V, first_step, steps):
    """Release V of skipped steps. Called after the first S of the warpgroup, as V of a block is loaded after K of the next one."""
    for i in T.serial(steps):
        V.wait(first_step + i)
        V.release(first_step + i)


@T.macro
def skip_last(w, K, V, ping_pong, first_step, steps):
    """Release K and V of the last steps, which a warpgroup skips, and pass its turns at the tensor cores on."""
    for i in T.serial(steps):
        K.wait(first_step + i)
        ping_pong.wait(w)
        ping_pong.pass_on(w)
        K.release(first_step + i)
        V.wait(first_step + i)
        V.release(first_step + i)


@T.meta_class
class FirstSteps:
    """First steps of a tile whose keys no query of a warpgroup sees, so that the warpgroup skips them.

    It waits for K and V of these steps and releases them, as in all other steps, and passes its turns at the tensor cores on.

    hidden: number of these steps.
    """

    def __init__(self, hidden: Any, name: str = "skipped"):
        self.count = T.alloc_var("int32", init=T.shfl_sync(hidden, 0))

    @T.inline
    def skip(self, w, K, ping_pong, first_step, blocks):
        """Leave the steps out of `blocks`, and release their K."""
        skip_keys(w, K, ping_pong, first_step, self.count[0])
        blocks.skip(self.count[0])

    def after(self, first_step: Any) -> Any:
        """First step that is computed, in the rings of K and V; in a uniform register, as it comes from one lane."""
        return T.shfl_sync(first_step + self.count[0], 0)

    @T.inline
    def release_values(self, V, first_step):
        skip_values(V, first_step - self.count[0], self.count[0])


@T.meta_class
class LastSteps:
    """Last steps of a tile whose keys no query of a warpgroup sees, so that the warpgroup skips them. See FirstSteps."""

    def __init__(self, hidden: Any, name: str = "hidden_last"):
        self.count = T.alloc_var("int32", init=T.shfl_sync(hidden, 0))

    @T.inline
    def skip(self, blocks):
        """Leave the steps out of `blocks`."""
        blocks.stop_before(self.count[0])

    @T.inline
    def release(self, w, K, V, ping_pong, first_step):
        skip_last(w, K, V, ping_pong, first_step, self.count[0])


class NoSteps:
    """Stand-in for FirstSteps and LastSteps in a kernel whose warpgroups compute all steps."""

    def skip(self, *others: Any) -> None:
        return None

    def after(self, first_step: Any) -> Any:
        return first_step

    def release_values(self, *others: Any) -> None:
        return None

    def release(self, *others: Any) -> None:
        return None
