"""A comparison of methods under one protocol: runs, records, statistics, tables."""
