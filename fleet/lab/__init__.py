# SPDX-License-Identifier: Apache-2.0
"""Disposable real hosts on one machine: systemd as PID 1, journald, sshd, an own address (see docs/lab.md)."""
