"""Builds the CPU kernels of the number formats ahead of the first use and prints the file."""

from inkling_rl.formats.kernels.cpu_library import KERNELS

if __name__ == "__main__":
    print(KERNELS.build())
