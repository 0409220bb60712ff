"""Tests of tasks that leave out what is slow and is tested elsewhere."""

from slow_calls import schema_derived_once as schema_derived_once
