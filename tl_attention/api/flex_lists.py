"""Lists of blocks and bits that flex_attention keeps for the calls of a BlockMask, until something that they are made of changes."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tl_attention.api.block_masks import ListsState, Origin, origin_of_lists
from tl_attention.checks.transforms import ARGUMENT_ERRORS
from tl_attention.launch.block_lists import FULL, HIDDEN, BlockLists, block_states
from tl_attention.problem.program import Call, Program
from tl_attention.tracing.builtin_options import program_with_bits, seen_distances
from tl_attention.tracing.captures import Captures, for_later_calls, versions
from tl_attention.tracing.fine_blocks import with_fine_blocks
from tl_attention.tracing.intervals import Blocks, distance_bounds, stream_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_LISTS = 8  # of one mask, for other batches and heads
MAX_COMPARED = 64  # functions that the lists of one mask were compared with
MAX_TOKENS = 1024
_kept: weakref.WeakKeyDictionary[Any, KeptMask] = weakref.WeakKeyDictionary()
# Of lists that a graph of torch.compile has: kv_indices -> facts -> KeptMask, which lives as long as the tensor, and facts -> KeptMask
_of_indices: Any = WeakTensorKeyDictionary()
_of_facts: weakref.WeakValueDictionary[tuple[Any, ...], KeptMask] = weakref.WeakValueDictionary()
_tokens: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count(2)  # True and False are 1 and 0


class KeptMask:
    """Lists of a BlockMask, as they were when this was made, and the lists of the kernels.

    Attributes:
        facts: all that the checks of a call read of the mask, but for its mask_mod.
        in_graphs: lists that CUDA graphs read at each replay, whatever has replaced them here since.
    """

    facts: tuple[Any, ...]

    def __init__(self, block_mask: Any, in_graphs: list[BlockLists]):
        self.in_graphs = in_graphs
        self._state = ListsState(block_mask)
        self._pointers = _pointers(self._state.tensors)
        self._size, self._lengths = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)
        self._origin = origin_of_lists(block_mask)
        self._token = None if self._origin is None else _token(self._origin.key)
        tensors = [x if x is None else (type(x), x.shape, x.dtype, x.device) for x in self._state.tensors]
        self.facts = self._size, self._lengths, *tensors
        self._made: dict[tuple[int, int], tuple[int, BlockLists]] = {}
        self._compared: dict[
            tuple[Any, ...], bool
        ] = {}  # key of a mask_mod -> True if the lists are those of it

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Lists of the BlockMask, in the order of LISTS."""
        return self._state.tensors

    def is_of(self, block_mask: Any) -> bool:
        """True if the lists are those of the block mask, without a change since."""
        return (
            tuple(block_mask.BLOCK_SIZE) == self._size
            and tuple(block_mask.seq_lengths) == self._lengths
            and self._state.are_in(block_mask)
            and self._pointers == _pointers(self._state.tensors)
        )

    def follow(self, mask_mod: Callable[..., Any]) -> bool:
        """True if the lists are those of a mask_mod, so that it alone says what is hidden.

        Lists that were made here are those of their mask_mod as long as what it captures is what it was then. Others are compared with
        a mask of q_idx - kv_idx at their first call, and the host waits for the result. In a CUDA graph capture, where it cannot, the
        answer is no.
        """
        if self._origin is not None and mask_mod is not self._origin.mask_mod:
            return False
        captures = Captures.of(mask_mod)
        if self._origin is not None:
            return self._origin.key is not None and Origin.of(mask_mod, captures) == self._origin
        if captures is None or captures.tensors:
            return False
        found = self._compared.get(captures.key)
        if found is None:
            if stream_of(self._state.tensors[0].device) is None:
                return False
            with for_later_calls():
                found = self._agree_with(mask_mod)
            if len(self._compared) >= MAX_COMPARED:
                self._compared.clear()
            self._compared[captures.key] = found
        return found

    def origin(self, mask_mod: Callable[..., Any]) -> int | bool | None:
        """Part of the key of a call that, beside what its functions capture, decides follow()."""
        if self._origin is None:
            return self.follow(mask_mod)
        return self._token if mask_mod is self._origin.mask_mod else None

    def _agree_with(self, mask_mod: Callable[..., Any]) -> bool:
        """True if the lists show what a mask of q_idx - kv_idx alone shows; False for another mask."""
        # Here, as the tools of torch that it needs take time to import
        from tl_attention.tracing.trace import trace

        size, lengths, device = self._size, self._lengths, self._state.tensors[0].device
        try:
            distances = seen_distances(trace(None, mask_mod, False), max(lengths))
        except ARGUMENT_ERRORS:  # the checks of the call refuse the function
            return False
        blocks = Blocks(1, 1, *lengths, *size, device)
        indices = [x for x in self._state.tensors[1::2] if x is not None]
        # Lists of more blocks than the lengths have, which the checks of the call refuse, may name blocks that do not exist
        if distances is None or any([x.shape[-1] > blocks.columns for x in indices]):
            return False
        full, empty = distance_bounds(*distances, blocks)
        states = block_states(*self._state.tensors, blocks.columns)
        return bool((((states != HIDDEN) | empty) & ((states != FULL) | full)).all())

    def lists(self, batch: int, heads: int) -> BlockLists:
        """Lists of the kernels, made at the first call on a stream."""
        stream = stream_of(self._state.tensors[0].device)
        made_on, lists = self._made.get((batch, heads), (None, None))
        # A CUDA graph capture may use what was made before it, on any stream; what it makes itself is empty until a replay
        if lists is not None and stream in (None, made_on):
            return lists
        size, lengths = self._size, self._lengths
        with for_later_calls():
            states = block_states(*self._state.tensors, -(-lengths[1] // size[1]))
            lists = BlockLists.of(states, size, lengths, (batch, heads))
        if stream is not None:
            if len(self._made) >= MAX_LISTS:
                self._made.clear()
            self._made[batch, heads] = stream, lists
        return lists

    def keep_for_graph(self, lists: BlockLists, with_bits: BlockLists | None) -> None:
        """Keep what a CUDA graph capture uses of lists(), unless it made them itself, in memory of the graph."""
        _, made = self._made.get(lists.shape, (None, None))
        used = with_bits or lists
        if made is lists and not any(x is used for x in self.in_graphs):
            self.in_graphs.append(used)


def _token(key: tuple[Any, ...] | None) -> int | None:
    """Number of a key of captures: a short form of it, which is never that of another one."""
    if key is None:
        return None
    if len(_tokens) >= MAX_TOKENS:
        _tokens.clear()
    return _tokens.setdefault(key, next(_numbers))


def _pointers(tensors: list[torch.Tensor | None]) -> list[int | None]:
    """Addresses, which show a replaced .data: the version of the tensor does not."""
    return [None if x is None else x.data_ptr() for x in tensors]


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """Address and layout in memory, which show a replaced .data: the version of the tensor does not."""
    return x.data_ptr(), x.shape, x.stride()


def kept_mask(block_mask: Any) -> KeptMask:
    """The KeptMask of a BlockMask, a new one after a change of its lists."""
    kept = _kept.get(block_mask)
    if kept is None or not kept.is_of(block_mask):
        kept = _kept[block_mask] = KeptMask(block_mask, [] if kept is None else kept.in_graphs)
    return kept


def block_mask_of(
    lists: Sequence[torch.Tensor], blocks: Sequence[int], mask_mod: Callable[..., Any]
) -> BlockMask:
    """A BlockMask of lists that a graph of torch.compile has, with the KeptMask of earlier calls on them.

    Args:
        lists: those of LISTS that are not None.
        blocks: BLOCK_SIZE and seq_lengths.
    """
    # A backward has other tensors of the same memory, which is not used anew while a KeptMask has it
    facts = (*blocks, *versions(lists), *map(_place, lists))
    kept = _of_facts.get(facts)
    # These do not keep kv_indices alive
    tensors = [x.detach() for x in lists] if kept is None else kept.tensors
    size, lengths = tuple(blocks[:2]), tuple(blocks[2:])
    tensors = [*tensors, *[None] * (8 - len(tensors))]
    mask = _block_mask_class()(lengths, *tensors, BLOCK_SIZE=size, mask_mod=mask_mod)
    if kept is None:
        kept = _of_facts[facts] = KeptMask(mask, [])
    of_lists = _of_indices.setdefault(lists[1], {})
    if len(of_lists) >= MAX_LISTS:
        of_lists.clear()
    of_lists[facts] = _kept[mask] = kept
    return mask


@functools.cache
def _block_mask_class() -> type[BlockMask]:
    """PyTorch's BlockMask, imported at the first call: the tools of torch that it needs take time to import."""
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask


def listed(call: Call, kept: KeptMask, query: torch.Tensor, heads: int, by_bits: bool = True) -> Call:
    """The call with the lists of its block mask; on a GPU with bits for its mask, unless these are too many.

    Args:
        query: [batch, ..]. heads: of query.
        by_bits: False keeps the mask a function.
    """
    lists = kept.lists(query.shape[0], heads)
    if lists.fine is not None:
        call = with_fine_blocks(call, *lists.fine)
    with_bits = lists_with_bits(call, lists) if query.is_cuda and by_bits else None
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        kept.keep_for_graph(lists, with_bits)
    if with_bits is not None:
        program, tensors, numbers = program_with_bits(call, max(lists.lengths))
        of_program = tuple([call.tensors[i] for i in tensors]), tuple([call.numbers[i] for i in numbers])
        return Call(program, *of_program, with_bits)
    return replace(call, program=call.program.as_listed, blocks=lists)


@functools.lru_cache(maxsize=1024)
def _of_mask(program: Program) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
    """The program without its score, and the tensors and numbers of a call that it needs."""
    mask = program.mask_alone
    return mask, mask.used("load"), mask.used("number")


class MaskState:
    """All that the mask of a call depends on: its program, its numbers, its tensors, and the changes in place of each.

    It keeps no tensor alive.
    """

    is_visible: bool

    def __init__(self, call: Call):
        self._program, of_tensors, of_numbers = _of_mask(call.program)
        self._numbers = [call.numbers[i] for i in of_numbers]
        tensors = [call.tensors[i] for i in of_tensors]
        changes = versions(tensors)
        self._tensors = [(weakref.ref(x), n, _place(x)) for x, n in zip(tensors, changes, strict=True)]
        self.is_visible = None not in changes  # inference mode counts no changes

    def has_program_of(self, call: Call) -> bool:
        """True if the mask of a call computes the same from what it captures."""
        program, _, _ = _of_mask(call.program)
        return program is self._program or program == self._program

    def is_of(self, call: Call) -> bool:
        """True if the mask of a call is the same, of a state that is visible."""
        if not self.has_program_of(call):
            return False
        _, of_tensors, of_numbers = _of_mask(call.program)
        if [call.numbers[i] for i in of_numbers] != self._numbers:
            return False
        for i, (tensor, version, place) in zip(of_tensors, self._tensors, strict=True):
            x, before = call.tensors[i], tensor()
            if before is not x and not _are_alike(before, x):
                return False
            if x._version != version or before._version != version or _place(x) != place:
                return False
        return True


def _are_alike(before: torch.Tensor | None, x: torch.Tensor) -> bool:
    """True if x has the memory of a tensor that is alive, as a backward of torch.compile has it, and changes of x are counted."""
    if before is None or x.is_inference():
        return False
    return before.dtype == x.dtype and _place(before) == _place(x)


_with_bits: weakref.WeakKeyDictionary[BlockLists, tuple[MaskState, BlockLists | None]] = (
    weakref.WeakKeyDictionary()
)


def lists_with_bits(call: Call, lists: BlockLists) -> BlockLists | None:
    """Lists with bits for the mask of a call, made at its first call; the bits are made again after a change of what it captures.

    None where there are too many; where the mask captures a tensor of inference mode, whose changes nobody counts; and in a CUDA graph
    capture, which cannot wait for their number, unless a call before it made them.
    """
    kept, with_bits = _with_bits.get(lists, (None, None))
    if kept is not None and kept.is_of(call):
        return with_bits
    state = MaskState(call)
    if not state.is_visible or torch.cuda.is_current_stream_capturing():
        return None
    with for_later_calls(), torch.no_grad():
        if kept is None or not kept.has_program_of(call):
            with_bits = lists.with_bits(call)
        elif with_bits is not None:  # only values are new: the same blocks need bits
            with_bits = with_bits.with_bits_again(call)
    _with_bits[lists] = state, with_bits
    return with_bits
