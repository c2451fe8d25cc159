# SPDX-License-Identifier: Apache-2.0
"""Stands in for the engine in tests of the benchmark's own course; it computes nothing."""
