# SPDX-License-Identifier: Apache-2.0
"""Control side of sglang-fleet: what bin/ runs. Hosts never see this package."""

from fleet import importer

importer.install()
