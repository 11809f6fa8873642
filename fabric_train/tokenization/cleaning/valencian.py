"""Tell Valencian from other Catalan by word forms.

Valencian and Catalan are one language with one code, ``ca``, and no identifier of languages tells them apart. The forms
are those in which the norm of the Acadèmia Valenciana de la Llengua (Gramàtica normativa valenciana, 2006) differs from
general Catalan (Gramàtica de la llengua catalana, Institut d'Estudis Catalans, 2016). Left out are forms that both
norms have (``aquest``, ``després``, ``veure``), and forms that are Spanish words as well (``este``, ``esta``, ``siga``,
``interés``), because Catalan texts quote Spanish. Texts of the north-west share some of the Valencian forms.
"""

import re

_VALENCIAN = """
meua meues teua teues seua seues
eixe eixa eixes estes açò ací
huit díhuit dihuit huitanta huité huitena cinqué sisé seté nové desé
hui vosté vostés mentres arrere prompte
servici servicis estrela estreles xicotet xicoteta xicotets xicotetes xiquet xiqueta xiquets xiquetes
anglés anglesos entés permés comprés promés xinés conéixer reconéixer aparéixer desaparéixer paréixer meréixer véncer
convéncer depén
tindre vindre mantindre obtindre contindre sostindre previndre intervindre convindre retindre
traure extraure traent vore eixir ixen eixit sigut
tinga tinguen mantinga continga obtinga vinguen puga puguen haja hagen faça facen vullga vullguen sàpia sàpien estiguen
seguix seguixen servix servixen oferix oferixen patix patixen existix existixen establix establixen definix definixen
afegix afegixen requerix requerixen convertix convertixen dirigix dirigixen decidix decidixen exigix exigixen
partix partixen repartix consistix consistixen permetix preferix garantix garantixen inserix restablix excedix
reduïx reduïxen produïx produïxen construïx construïxen constituïx constituïxen contribuïx distribuïx substituïx
"""
_GENERAL = """
meva meves teva teves seva seves
vuit divuit vuitanta vuitè vuitena cinquè sisè setè novè desè
avui vostè vostès endarrere
anglès francès interès entès permès comprès promès xinès conèixer reconèixer aparèixer desaparèixer parèixer merèixer
vèncer convèncer depèn
treure extreure sortir sortit surten
sigui siguin tingui tinguin mantingui contingui obtingui vingui vinguin pugui puguin hagi hagin faci facin vulgui
vulguin estigui estiguin sàpiga
"""
_WORD = re.compile(r"\w+")
VALENCIAN, GENERAL = frozenset(_VALENCIAN.split()), frozenset(_GENERAL.split())


def count_forms(text: str) -> tuple[int, int]:
    """Return how many words of a Catalan text have a Valencian form, and how many a form of general Catalan."""
    words = _WORD.findall(text.lower())
    return sum(word in VALENCIAN for word in words), sum(word in GENERAL for word in words)
