"""The model card of an export. Open ``write_card.py`` first: it has the order of the sections.

``record.py`` reads what a checkpoint says, ``record.py`` keeps private names out, and each ``card_…`` module
writes a part of the card.
"""

from fabric_train.export.model_card.card_data import stages_through
from fabric_train.export.model_card.record import CardFacts
from fabric_train.export.model_card.write_card import draw_card_picture, write_model_card

__all__ = ["CardFacts", "draw_card_picture", "stages_through", "write_model_card"]
