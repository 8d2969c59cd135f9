"""Rows in Ray's object store: kept by two ranks, held by the driver, freed with the last reference."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tests.unit.distributed.tensor.kept import Hosts, Studio, pictures
from tests.unit.distributed.tensor.test_plane import request
from tests.unit.types.same import assert_same_sample
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement, Slab
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.distributed.tensor.plane import resolved
from unirl.types.metric import values

pytestmark = pytest.mark.ray
