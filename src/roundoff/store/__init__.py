"""A run on disk: written step by step so that a killed process leaves whole steps, read lazily."""

from roundoff.store.loading import load
from roundoff.store.reader import Run
from roundoff.store.schema import OPS, SCALARS, SCHEMA, site_name
from roundoff.store.siblings import siblings
from roundoff.store.tensors import content_hash
from roundoff.store.writer import Writer

__all__ = [
    "OPS",
    "SCALARS",
    "SCHEMA",
    "Run",
    "Writer",
    "content_hash",
    "load",
    "siblings",
    "site_name",
]
