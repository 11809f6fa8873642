"""Frequent words of languages, of which Gopher's rules expect two in a document.

English: Gopher's own list (arXiv:2112.11446, appendix A.1.1). The others are FineWeb-2's (arXiv:2506.20920, files
``configs/*.yml`` of its repository, Apache-2.0), without the forms with an apostrophe (``l'``, ``d'``), which are not
words of their own here.
"""

_LISTS = {
    "en": "the be to of and that have with",
    "es": "de la en el y a que del los se por un con una las su",
    "ca": "de el la a i en que va els per un les una amb es",
    "gl": "de a e o en que do da un no os na é unha como",
    "pt": "de a e o em do da que um no uma com para na é foi",
    "oc": "de la e lo en a es per que un una del dins las",
    "fr": "de la le et à en des du les est un une il dans par au",
    "it": "di e il la in a del che è della un per nel con da i una",
}
STOP_WORDS = {language: frozenset(words.split()) for language, words in _LISTS.items()}
