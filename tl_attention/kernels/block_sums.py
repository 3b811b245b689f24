"""Sums of dS along diagonals by the warpgroup that computes dQ, on the tensor cores.

A step has a tile dS' [128 keys, 128 queries] in shared memory: 16 x 16 blocks of 8 x 8. The block diagonal d has the blocks whose query
block minus key block is d. mma.sync adds them up, as a unit matrix times a block is the block. That leaves 8 x 8 numbers per block
diagonal, which shuffles sum along their diagonals. The product of a 0 and a NaN is NaN: a NaN or inf of dS reaches all numbers of its key
that the same instructions add.

Warp w has the block diagonals d = x and d = x - 16 for x = 4 w to 4 w + 3, which are 16 blocks per x. Where the queries of a step follow
those of the step before, its d = x - 16 has the distances that d = x had there. So a step completes 128 distances, and passes the
sums of d = x on to the next step.
"""

from __future__ import annotations

import tilelang.language as T

from tl_attention.kernels.pipeline import ExchangeRing
from tl_attention.kernels.traced import at_distance
from tl_attention.kernels.traced_arguments import TracedArguments
from tl_attention.problem import AttnProblem
from tl_attention.program import FLOAT, INT

STEP = 128  # queries of a step, and keys of a tile
SUMS_PER_LANE = 2

# x: sums of this thread, for each x two of the block diagonal d = x, then two of d = x - 16. They are transposed: lane 4 g + c has query g
# and keys 2 c and 2 c + 1 of 8 x 8. Needs DIAGONALS
ADD_BLOCKS = """
// Adds the blocks of a tile, which begins at this address. ldmatrix loads four at a time: two of an even x, and two of the next x that have
// the same query blocks, so the key blocks before. A warp begins where query block 0 belongs to its first x: then the compiler knows the
// query blocks, and with them the swizzle
TL_DEVICE void tl_attention_add_blocks(void *x, unsigned tile) {
  unsigned lane = tl_attention_thread() % 32u, first_x = tl_attention_thread() / 32u % 4 * 4;
  unsigned unit = (lane / 4 == lane % 4 * 2 ? 0x3f80u : 0) | (lane / 4 == lane % 4 * 2 + 1 ? 0x3f800000u : 0);  // row of the matrix, bf16
  unsigned is_second = lane / 8 % 2, is_next_x = lane / 16;  // block whose row this lane names
  tile += lane % 8 * 128 + ((is_second ^ lane % 8) << 4);
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    unsigned key_block = n + is_second - is_next_x - first_x & 15;
    unsigned rows = tile + key_block % 8 * 1024 + key_block / 8 * 16384;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      int query_block = (n + i) % 16;
      unsigned b[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"((rows ^ query_block % 8 << 4) + query_block / 8 * 8192) : "memory");
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float *d = (float *)x + 4 * (i + k);
        bool is_right = n + i < 16 && (k ? n > first_x : n >= first_x), is_second_right = n + i < 16 && n >= first_x;  // of d = x
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(is_right ? unit : 0), "r"(is_right ? 0 : unit), "r"(is_second_right ? unit : 0),
                       "r"(is_second_right ? 0 : unit), "r"(b[2 * k]), "r"(b[2 * k + 1]));
      }
    }
  }
}
// Takes the sums of d = x - 16 out of x: those of this lane along diagonals, see tl_attention_block_distance
TL_DEVICE void tl_attention_take_sums(void *sums, void *x) {
  float by_place[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float *d = (float *)x + 4 * i;
#pragma unroll
    for (int k = 0; k < 2; ++k) by_place[2 * (3 - i) + k] = d[2 + k], d[2 + k] = d[k], d[k] = 0.f;
  }
  tl_attention_sum_diagonals<24>(sums, by_place);
}
// q_idx - kv_idx of sum i of this lane. difference: that of the first query and the first key of the tile
TL_DEVICE int tl_attention_block_distance(int difference, int i) {
  int last_x = tl_attention_thread() / 32 % 4 * 4 + 3;
  return difference + 8 * (last_x - 16) + 7 - tl_attention_summed_slot(i);  // slot 0: the last query, the first key of a block
}
"""


@T.meta_class
class BlockSums:
    """Sums of dS for the gradient of a bias per diagonal. Needs ADD_BLOCKS.

    Args:
        dS: tiles of a step.
    """

    def __init__(
        self, problem: AttnProblem, arguments: TracedArguments, dS: ExchangeRing, name: str = "block_sums"
    ):
        (self.gradient,) = problem.program.diagonal_gradients
        self.arguments, self.dS = arguments, dS
        self.addition = f"tl_attention_add{'_exactly' * problem.program.exact}"
        self.shares_targets = problem.program.shares_targets(self.gradient)
        self.out = arguments.gradients[problem.program.gradients[self.gradient].tensor]
        self.x = T.alloc_local([16], FLOAT)
        # In front of the loops: for an address of shared memory in them TileLang 0.1.15 puts a fence before the next wgmma
        address = T.call_extern(INT, "smem_ptr_to_uint", T.address_of(dS.tiles[0, 0, 0]))
        self.first_slot = T.alloc_var(INT, init=address)
        self.sums = T.alloc_local([SUMS_PER_LANE], FLOAT)
        self.targets = T.alloc_local([SUMS_PER_LANE], INT)
        self.batch = T.alloc_var(INT, init=0)
        # Head of the step before, -1 in front of the first, and q_idx - kv_idx of its first query and key
        self.head = T.alloc_var(INT, init=-1)
        self.difference = T.alloc_var(INT, init=0)

    @T.inline
    def start(self, batch):
        """Begin a key tile."""
        self.batch[0] = batch
        for i in T.unroll(16):
            self.x[i] = 0.0

    @T.inline
    def add(self, step, head, difference):
        """Add the tile of a step. difference: q_idx - kv_idx of its first query and key."""
        if (head != self.head[0]) | (difference != self.difference[0] + STEP):
            self.end()
        self.head[0] = head
        self.difference[0] = difference
        first = self.first_slot[0] + self.dS.slot_bytes(step)
        T.evaluate(T.call_extern("handle", "tl_attention_add_blocks", self.x.data, first))

    @T.inline
    def store(self, difference):
        """Add the sums to memory that a step with this difference has completed."""
        T.evaluate(T.call_extern("handle", "tl_attention_take_sums", self.sums.data, self.x.data))
        for i in T.unroll(SUMS_PER_LANE):
            distance = T.call_extern(INT, "tl_attention_block_distance", difference, i)
            where = self.batch[0], self.head[0], distance, self.arguments
            self.targets[i] = at_distance(f"target{self.gradient}", INT, *where)
        if self.shares_targets:
            merge = f"tl_attention_merge_sums<{SUMS_PER_LANE}>"
            T.evaluate(T.call_extern("handle", merge, self.sums.data, self.targets.data))
        for i in T.unroll(SUMS_PER_LANE):
            out = self.out.access_ptr("rw")
            T.evaluate(T.call_extern("handle", self.addition, out, self.targets[i], self.sums[i]))

    @T.inline
    def end(self):
        """Add the sums to memory that no further step completes."""
        if self.head[0] >= 0:
            self.store(self.difference[0] + STEP)
        self.head[0] = -1
