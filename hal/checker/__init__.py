# SPDX-License-Identifier: Apache-2.0
"""The ordering checker: litmus programs, and the shipped kernels, run under every delivery that a profile allows."""
