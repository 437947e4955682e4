"""SI constants, so that every number in the package is written with its unit."""

KB, MB, GB = 1e3, 1e6, 1e9
KIB, MIB, GIB = 2**10, 2**20, 2**30
MICROSECOND, MILLISECOND = 1e-6, 1e-3
MBIT_PER_S, GBIT_PER_S = 1e6 / 8, 1e9 / 8  # in bytes per second
WAIT_REPORT_S = 10.0  # a wait reports itself after this time, then after twice, four times, ... this time
