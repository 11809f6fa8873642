"""Texts of the dirt that dirty_corpus.py plants."""

import random
from typing import Any

HEADER = "Biblioteca digital de textos clásicos | Inicio | Catálogo | Contacto"
FOOTER = "Todos los derechos reservados. Consulte el aviso legal y la política de privacidad."

CONTACTS = (
    ("e-mail", ("Para más información, escriba a {} antes del martes.", "Write to {} before Tuesday.")),
    ("telephone", ("Puede llamar al teléfono {} por las mañanas.", "Call my phone, {}, in the morning.")),
    ("IBAN", ("Haga el ingreso en la cuenta {} de la parroquia.", "Please pay into the account {} this week.")),
    ("DNI", ("La firmante, con DNI {}, declara lo anterior.", "The undersigned, with identity number {}, agrees.")),
    ("IP address", ("El mensaje llegó desde la dirección {} anoche.", "The message came from {} last night.")),
    ("e-mail in words", ("Escriba a {} para apuntarse.", "Write to {} to join.")),
    ("French telephone, national form", ("En París, llame al {} y pregunte.", "In Paris, call {} and ask.")),
)
"""Kind of personal data, and a sentence in Spanish and in English."""

_IP_ADDRESSES = ((80, 95), (80, 250), (80, 250), (80, 250))
"""Least and largest number of each byte: of public addresses."""

SHORT = (
    "Esta web utiliza cookies propias y de terceros.",
    "Aceptar todo. Configurar. Rechazar.",
    "Su navegador no admite este vídeo.",
    "Click here to continue reading.",
    "Page not found. Go back to the home page.",
    "Suscríbase a nuestro boletín.",
)
MENU = ("Inicio", "Contacto", "Quiénes somos", "Tienda", "Mi cuenta", "Carrito (0)", "Blog", "Ayuda", "Mapa web")

# Universal Declaration of Human Rights, articles 1 to 5
OTHER_LANGUAGES = {
    "ca": (
        "Tots els éssers humans neixen lliures i iguals en dignitat i en drets. Són dotats de raó i de consciència, i "
        "han de comportar-se fraternalment els uns amb els altres.",
        "Tothom té tots els drets i llibertats proclamats en aquesta Declaració, sense cap distinció de raça, color, "
        "sexe, llengua, religió, opinió política o de qualsevol altra mena.",
        "Tot individu té dret a la vida, a la llibertat i a la seguretat de la seva persona.",
        "Cap persona no serà sotmesa a esclavatge o servitud: l'esclavitud i el tràfic d'esclaus són prohibits.",
        "Ningú no serà sotmès a tortures ni a penes o tractes cruels, inhumans o degradants.",
    ),
    "pt": (
        "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de consciência, "
        "devem agir uns para com os outros em espírito de fraternidade.",
        "Todos os seres humanos podem invocar os direitos e as liberdades proclamados na presente Declaração, sem "
        "distinção alguma, nomeadamente de raça, de cor, de sexo, de língua ou de religião.",
        "Todo o indivíduo tem direito à vida, à liberdade e à segurança pessoal.",
        "Ninguém será mantido em escravatura ou em servidão; a escravatura e o trato dos escravos são proibidos.",
        "Ninguém será submetido a tortura nem a penas ou tratamentos cruéis, desumanos ou degradantes.",
    ),
    "it": (
        "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di "
        "coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
        "Ad ogni individuo spettano tutti i diritti e tutte le libertà enunciate nella presente Dichiarazione, senza "
        "distinzione alcuna, per ragioni di razza, di colore, di sesso, di lingua, di religione.",
        "Ogni individuo ha diritto alla vita, alla libertà ed alla sicurezza della propria persona.",
        "Nessun individuo potrà essere tenuto in stato di schiavitù o di servitù.",
        "Nessun individuo potrà essere sottoposto a tortura o a trattamento o a punizione crudeli.",
    ),
    "fr": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
        "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
        "Chacun peut se prévaloir de tous les droits et de toutes les libertés proclamés dans la présente "
        "Déclaration, sans distinction aucune, notamment de race, de couleur, de sexe, de langue, de religion.",
        "Tout individu a droit à la vie, à la liberté et à la sûreté de sa personne.",
        "Nul ne sera tenu en esclavage ni en servitude; l'esclavage et la traite des esclaves sont interdits.",
        "Nul ne sera soumis à la torture, ni à des peines ou traitements cruels, inhumains ou dégradants.",
    ),
    "de": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt "
        "und sollen einander im Geist der Brüderlichkeit begegnen.",
        "Jeder hat Anspruch auf die in dieser Erklärung verkündeten Rechte und Freiheiten ohne irgendeinen "
        "Unterschied, etwa nach Rasse, Hautfarbe, Geschlecht, Sprache oder Religion.",
        "Jeder hat das Recht auf Leben, Freiheit und Sicherheit der Person.",
        "Niemand darf in Sklaverei oder Leibeigenschaft gehalten werden.",
        "Niemand darf der Folter oder grausamer, unmenschlicher oder erniedrigender Behandlung unterworfen werden.",
    ),
}

TASKS: tuple[dict[str, Any], ...] = (
    {
        "language": "en",
        "question": "A farmer has seventeen sheep in the upper field and all but nine of them run away through the gap "
        "in the hedge, how many sheep are left in the upper field that evening?",
        "choices": ["eight", "nine", "seventeen"],
    },
    {
        "language": "en",
        "question": "When a glass of cold water stands in a warm room on a humid day, where does the water on the "
        "outside of the glass come from?",
        "choices": ["from inside the glass", "from the air", "from the table"],
    },
    {
        "language": "es",
        "question": "Un tren sale de Valencia a las ocho de la mañana y otro sale de Madrid una hora más tarde, ¿cuál "
        "de los dos está más cerca de Madrid en el momento en que se cruzan?",
        "choices": ["el primero", "el segundo", "los dos están a la misma distancia"],
    },
    {
        "language": "es",
        "question": "Si se deja un cubito de hielo en un vaso lleno de agua hasta el borde y se espera a que se funda "
        "del todo, ¿qué pasa con el nivel del agua?",
        "choices": ["sube", "baja", "no cambia"],
    },
    {
        "language": "es",
        "quotes": "Génesis 1",
        "question": "¿De qué libro son estas palabras? Y la tierra estaba desordenada y vacía, y las tinieblas estaban "
        "sobre la haz del abismo, y el Espíritu de Dios se movía sobre la haz de las aguas.",
        "choices": ["Génesis", "Salmos", "Job"],
    },
)
"""Items of an evaluation task; the last one quotes a document that is in the corpus by itself."""

PARAPHRASES = (
    ("en", "Of seventeen sheep in a field, every one except nine escapes by a hole in the hedge. Say how many remain."),
    ("es", "En un vaso con agua hasta arriba flota un hielo. Cuando se ha derretido, ¿ha cambiado la altura del agua?"),
)


def personal_data(rng: random.Random) -> dict[str, str]:
    """Return invented personal data by kind; numbers have valid check digits and exist in numbering plans."""
    from stdnum import iban
    from stdnum.es import ccc, dni

    name = rng.choice(("ana", "jordi", "maria.soler", "p_garcia", "lucia-ferrer")) + str(rng.randint(1, 9999))
    domain = rng.choice(("example.com", "correo.example.es", "mail.example.org"))
    dni_digits = f"{rng.randrange(10**8):08d}"
    # a Spanish account: bank and branch, two check digits, number; the IBAN has two more for all of it
    bank_and_branch = rng.choice(("2100", "0049", "0182")) + "0418"
    account_number = f"{rng.randrange(10**10):010d}"
    account = bank_and_branch + ccc.calc_check_digits(f"{bank_and_branch}00{account_number}") + account_number
    country_code = rng.choice(("", "+34 "))
    return {
        "e-mail": f"{name}@{domain}",
        "telephone": f"{country_code}6{rng.randint(10, 89)} {rng.randint(100, 999)} {rng.randint(101, 999)}",
        "IBAN": iban.format(f"ES{iban.calc_check_digits(f'ES00{account}')}{account}"),
        "DNI": dni_digits + dni.calc_check_digit(dni_digits),
        "IP address": ".".join(str(rng.randint(low, high)) for low, high in _IP_ADDRESSES),
        "e-mail in words": f"{name} arroba example punto com",
        "French telephone, national form": "01 42 " + " ".join(str(rng.randint(20, 98)) for _ in range(3)),
    }
