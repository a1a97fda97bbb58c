"""Which numbers a script draws its cases from: named ones, so many from a first one, or as many as there is time for."""

import argparse
import time
from collections.abc import Iterator


def add_arguments(parser: argparse.ArgumentParser, minutes: float) -> None:
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--cases", type=int, help="so many, however long they take")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these alone, told in full")


def seeds(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.only:
        yield from arguments.only
        return
    end, seed = time.perf_counter() + 60 * arguments.minutes, arguments.first
    while seed < arguments.first + arguments.cases if arguments.cases else time.perf_counter() < end:
        yield seed
        seed += 1
