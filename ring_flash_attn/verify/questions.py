"""Names of `catalogue`, for those who still look here."""

from .catalogue import FEATURES as FEATURES
