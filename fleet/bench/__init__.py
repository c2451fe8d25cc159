# SPDX-License-Identifier: Apache-2.0
"""The benchmark: decoding arms side by side on one GPU, in turn, with their outputs compared.

Runs on a bare machine: Python 3.11+, PyYAML, the engine. matplotlib draws the plot where it is there.
"""
