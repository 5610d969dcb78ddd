"""Builds the CPU kernels of the number formats ahead of the first use and prints the files."""

from inkling_rl.formats.kernels import cpu_library, cpu_marlin

if __name__ == "__main__":
    for kernels in (cpu_library.KERNELS, cpu_marlin.KERNELS):
        print(kernels.build())
