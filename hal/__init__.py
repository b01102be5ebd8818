# SPDX-License-Identifier: Apache-2.0
"""HAL: one mixture-of-experts dispatch and combine interface over NVIDIA and Ascend, with an executable ordering contract."""

__version__ = "0.1.0"
