"""Runs that differ in nothing that is wrong, and runs that do, made of the same parts.

    models.py      small networks beside those of tests/faults
    pairs.py       two ways to run one training: nothing in them may be blamed
    rewrites.py    the same network written in another way
    schedules.py   whole sequences against a cache, chunks, paddings, micro-batches; with planted bugs
    scripts.py     scripts as users write them, with all that they make before their first step
    script_pairs.py      two ways to write one
    script_portions.py   in portions, or in several processes; with planted bugs
    layouts.py     one process against several; with planted bugs
    layers.py      models of libraries with a layer by another hand, as workload files; with planted bugs
    layer_scripts.py     as scripts, in portions, formats and processes; with planted bugs
    workloads.py   workload files made of one text

A planted bug states where it is: globs over the sites that may be named first. benchmarks/clean_pairs.py measures all.
"""
