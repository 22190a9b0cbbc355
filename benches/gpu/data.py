"""Writes the batches of a case as a folder of .npy, without numpy.

    python data.py CASE FOLDER
"""

import ctypes
import sys
from pathlib import Path

import torch

import cases
import models

KINDS = {torch.int64: "<i8", torch.float32: "<f4"}


def write(path, tensor):
    """Version 1.0 of the format: a header of a multiple of 64 bytes, then the elements in rows."""
    tensor = tensor.contiguous()
    header = str({"descr": KINDS[tensor.dtype], "fortran_order": False, "shape": tuple(tensor.shape)})
    header = header.ljust(-(-(len(header) + 11) // 64) * 64 - 11) + "\n"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("ascii"))
        file.write((ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr()))


def main():
    case, folder = cases.CASES[sys.argv[1]], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in models.batches(case).items():
        write(folder / f"{name}.npy", rows)


if __name__ == "__main__":
    main()
