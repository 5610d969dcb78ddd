"""Arguments for every implementation of Marlin's layouts, and a program that holds Triton's interpreter against them.

    TRITON_INTERPRET=1 python -m tests.inkling_rl.marlin_cases

Not tests: the interpreter has to be switched on before triton is imported, hence a process of its own.
"""

from __future__ import annotations

import torch

WeightArguments = tuple[torch.Tensor, int, int, int, int]
ScaleArguments = tuple[torch.Tensor, int | None, int, int, int]


def weight_cases() -> dict[str, WeightArguments]:
    """Arguments of `pack_weight`: codes, bits, shards, rows, columns."""
    g = torch.Generator().manual_seed(0)
    cases: dict[str, WeightArguments] = {}
    for bits in (4, 8):
        for label, experts, shards, stored_rows, rows, stored_columns, columns in (
            ("one tile", 1, 1, 64, 64, 16, 16),
            ("two shards", 2, 2, 64, 64, 64, 64),
            ("padded rows", 2, 2, 40, 64, 64, 64),
            ("more padding than a strip", 1, 2, 32, 128, 32, 32),
            ("padded columns", 2, 1, 64, 64, 96, 128),
            ("columns past a group of tiles", 1, 1, 128, 128, 288, 288),
            ("three strips", 1, 2, 192, 192, 48, 48),
        ):
            shape = (experts, shards * stored_rows, stored_columns * bits // 8)
            codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
            cases[f"{bits} bits, {label}"] = (codes, bits, shards, rows, columns)
        wide = torch.randint(0, 256, (4, 256, 64 * bits // 8), generator=g, dtype=torch.uint8)
        cases[f"{bits} bits, slice of rows"] = (wide[1::2, 64:192], bits, 2, 64, 64)
        columns = slice(16 * bits // 8, 48 * bits // 8)
        cases[f"{bits} bits, slice of columns"] = (wide[:2, :128, columns], bits, 1, 128, 64)
        cases[f"{bits} bits, bytes apart"] = (wide[:1, :64, ::2], bits, 1, 64, 32)
        cases[f"{bits} bits, odd start"] = (wide.flatten()[3 : 3 + 64 * 8 * bits].view(1, 64, -1), bits, 1, 64, 64)
    return cases


def scale_cases() -> dict[str, ScaleArguments]:
    """Arguments of `permute_scales`: scales, shift, shards, rows, groups."""
    g = torch.Generator().manual_seed(1)
    cases: dict[str, ScaleArguments] = {}
    for shift in (None, 0, 1, 2, 3, 9, 17):
        # Bytes that occur with this shift: the largest, moved up, is 448 at most.
        limit = 256 if shift is None else 0x7F - 8 * shift if shift < 15 else 9 - shift // 2
        for label, experts, shards, stored_rows, rows, stored_groups, groups in (
            ("one block", 1, 1, 64, 64, 1, 1),
            ("padded", 2, 2, 40, 64, 3, 4),
            ("four groups", 1, 2, 64, 64, 4, 4),
            ("eight groups", 1, 2, 96, 128, 8, 8),
            ("more than a tile", 2, 1, 192, 192, 34, 36),
            ("more than a block of words", 1, 1, 256, 256, 96, 96),
        ):
            shape = (experts, shards * stored_rows, stored_groups)
            scales = torch.randint(0, limit, shape, generator=g, dtype=torch.uint8)
            cases[f"shift {shift}, {label}"] = (scales, shift, shards, rows, groups)
        wide = torch.randint(0, limit, (4, 256, 32), generator=g, dtype=torch.uint8)
        cases[f"shift {shift}, slice of rows"] = (wide[1::2, 64:192], shift, 2, 64, 32)
        cases[f"shift {shift}, slice of columns"] = (wide[:2, :128, 18:27], shift, 1, 128, 12)
        cases[f"shift {shift}, slice of whole words"] = (wide[:2, :128, 4:24], shift, 1, 128, 20)
        for place in range(4):
            alone = torch.zeros(2, 64, 4, dtype=torch.uint8)
            alone[1, 40, place] = limit - 1
            cases[f"shift {shift}, one byte in place {place}"] = (alone, shift, 1, 64, 4)
        cases[f"shift {shift}, bytes apart"] = (wide[:1, :64, ::2], shift, 1, 64, 16)
    return cases


def hopper_ptx() -> dict[str, str]:
    """PTX of each Triton kernel for sm_90, integers of the real shapes known to be multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inkling_rl.formats.kernels import triton_marlin

    tiles = {"SHARDS": 2, "TILES_K": triton_marlin.TILES_K}
    scales = {"SHARDS": 2, "NVFP4": True, "SHIFTED": False, "VECTOR": 4}
    scales |= {"ROWS": triton_marlin.SCALE_ROWS, "GROUPS": triton_marlin.SCALE_GROUPS}
    largest = {"BLOCK": triton_marlin.LARGEST_WORDS}
    found = {}
    for label, kernel, pointers, constants in (
        ("nvfp4", triton_marlin._pack4_kernel, {"codes": "*i64", "words": "*i32"}, tiles),
        ("mxfp8", triton_marlin._pack8_kernel, {"codes": "*i64", "words": "*i32"}, tiles),
        ("scales", triton_marlin._scale_kernel, {"scales": "*i32", "out": "*i32"}, scales),
        ("largest", triton_marlin._largest_kernel, {"words": "*i32", "found": "*i32"}, largest),
    ):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        aligned = [i for i, n in enumerate(names) if n not in (*constants, "shift", "valid_vectors")]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        found[label] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return found


def main() -> None:
    from inkling_rl.formats.kernels import triton_marlin
    from inkling_rl.formats.reference import marlin as reference

    for label, weights in weight_cases().items():
        assert torch.equal(triton_marlin.pack_weight(*weights), reference.pack_weight(*weights)), label
    for label, (scales, *_) in scale_cases().items():
        assert torch.equal(triton_marlin.largest_scales(scales), reference.largest_scales(scales)), label
    for label, scales in scale_cases().items():
        assert torch.equal(triton_marlin.permute_scales(*scales), reference.permute_scales(*scales)), label
    print(len(weight_cases()) + len(scale_cases()))


if __name__ == "__main__":
    main()
