"""Which channels of a network depend on each other: followed through a run, whatever code the model is made of."""

from roundoff.quantize.channels.groups import (
    Binding,
    ChannelGroup,
    Purpose,
    channel_groups,
    components,
    followed,
    groups_of,
)
from roundoff.quantize.channels.labels import Passed

__all__ = [
    "Binding",
    "ChannelGroup",
    "Passed",
    "Purpose",
    "channel_groups",
    "components",
    "followed",
    "groups_of",
]
