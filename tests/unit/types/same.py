"""Equality of batched values, field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from unirl.types.batch import Rows
from unirl.types.sample import Sample


def assert_same(a: Any, b: Any) -> None:
    """Equal in type, dtype, shape and value."""
    assert type(a) is type(b)
    if isinstance(a, Rows):
        for field in dataclasses.fields(a):
            assert_same(a.__dict__[field.name], b.__dict__[field.name])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b


def assert_same_sample(a: Sample, b: Sample) -> None:
    """Equal in every field of every Part."""
    assert len(a.parts) == len(b.parts)
    for own, other in zip(a.parts, b.parts, strict=True):
        assert_same(own, other)
