# SPDX-License-Identifier: Apache-2.0
"""The engine for GPU machines without a network: packed here (bin/gpu-pack), unpacked there (unpack.py)."""
