# SPDX-License-Identifier: Apache-2.0
"""What ``hal bench`` measures on each rank, and the table it becomes."""
