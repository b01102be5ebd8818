# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts stack over a real text: what ``hal demo`` runs, and what it is compared with."""
