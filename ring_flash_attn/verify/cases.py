"""Names of `catalogue`, for those who still look here."""

from .catalogue import Choice as Choice
from .catalogue import Named as Named
from .catalogue import chosen_functions as chosen_functions
from .catalogue import points as points
