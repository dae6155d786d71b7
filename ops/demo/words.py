"""How seven languages write months, weekdays, days and what stands around a date.

Plain tables for `dates.py`, written by hand: the month names and abbreviations of each language, with some
spellings of people who type without accents. No spelling names two different months.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """What one language needs to write a date.

    `months` holds twelve tuples of spellings, the full name first. `patterns` are format strings over
    `d` (day), `o` (day as an ordinal), `m` (month) and `y` (year). `before` and `after` are what a letter or
    an invoice puts around a date; `{n}` in them is a number that is no part of the date.
    """

    months: tuple[tuple[str, ...], ...]
    weekdays: tuple[str, ...]
    patterns: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


def phrases(table: str) -> tuple[str, ...]:
    """Split 'invoice dated | due on' at the bars."""
    return tuple(phrase.strip() for phrase in table.split("|"))


def spellings(table: str) -> tuple[tuple[str, ...], ...]:
    """Split 'January Jan | February Feb' into a tuple of spellings for each month."""
    return tuple(tuple(month.split()) for month in phrases(table))


ENGLISH_ORDINAL_WORDS = phrases(
    """
        first | second | third | fourth | fifth | sixth | seventh | eighth | ninth | tenth | eleventh |
        twelfth | thirteenth | fourteenth | fifteenth | sixteenth | seventeenth | eighteenth |
        nineteenth | twentieth | twenty-first | twenty-second | twenty-third | twenty-fourth |
        twenty-fifth | twenty-sixth | twenty-seventh | twenty-eighth | twenty-ninth | thirtieth |
        thirty-first
    """
)

LANGUAGES: dict[str, Language] = {
    "en": Language(
        months=spellings(
            """
                January Jan | February Feb | March Mar | April Apr | May | June Jun | July Jul |
                August Aug | September Sep Sept | October Oct | November Nov | December Dec
            """
        ),
        weekdays=phrases(
            """
                Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday | Mon | Tue | Wed |
                Thu | Fri
            """
        ),
        patterns=phrases(
            """
                {d} {m} {y} | {o} {m} {y} | {o} of {m} {y} | the {o} of {m}, {y} | the {o} of {m} {y} |
                {m} {d}, {y} | {m} {o}, {y} | {m} {o} {y} | {m} {d} {y} | {m} the {o}, {y} | {d}-{m}-{y}
            """
        ),
        before=phrases(
            """
                invoice dated | due on | date: | paid on | received | signed on | on | born | as of |
                ref {n}, date | order {n} of | delivery by | expires | meeting on | dated the |
                we met on
            """
        ),
        after=phrases(
            """
                at 10:30 | (paid) | in Leeds | for {n} EUR | - urgent | was the deadline | by post |
                5 pm | at noon | as agreed
            """
        ),
    ),
    "de": Language(
        months=spellings(
            """
                Januar Jan Jänner | Februar Feb | März Mrz Maerz | April Apr | Mai | Juni Jun |
                Juli Jul | August Aug | September Sep Sept | Oktober Okt | November Nov | Dezember Dez
            """
        ),
        weekdays=phrases(
            """
                Montag | Dienstag | Mittwoch | Donnerstag | Freitag | Samstag | Sonntag | Mo | Di | Mi |
                Do | Fr
            """
        ),
        patterns=phrases(
            """
                {d}. {m} {y} | {d}. {m} {y} | {d}.{m} {y} | {d} {m} {y} | {d}ten {m} {y} |
                den {d}. {m} {y}
            """
        ),
        before=phrases(
            """
                Rechnung vom | fällig am | Datum: | am | Berlin, den | geboren am | Lieferung bis | ab |
                Auftrag {n} vom | gezahlt am | Stand: | bis zum
            """
        ),
        after=phrases("um 10 Uhr | in Köln | (bezahlt) | über {n} EUR | per Post | wie vereinbart"),
    ),
    "fr": Language(
        months=spellings(
            """
                janvier janv | février févr fév | mars | avril avr | mai | juin | juillet juil | août |
                septembre sept | octobre oct | novembre nov | décembre déc
            """
        ),
        weekdays=phrases("lundi | mardi | mercredi | jeudi | vendredi | samedi | dimanche"),
        patterns=phrases("{o} {m} {y} | {o} {m} {y} | le {o} {m} {y} | {d} {m} {y} | le {o} {m}, {y}"),
        before=phrases(
            """
                facture du | échéance : | le | Paris, le | né le | payé le | commande {n} du |
                avant le | reçu le | à partir du
            """
        ),
        after=phrases("à 10 h | à Lyon | (payé) | pour {n} EUR | par courrier | comme convenu"),
    ),
    "es": Language(
        months=spellings(
            """
                enero ene | febrero feb | marzo mar | abril abr | mayo may | junio jun | julio jul |
                agosto ago | septiembre sep sept setiembre | octubre oct | noviembre nov | diciembre dic
            """
        ),
        weekdays=phrases("lunes | martes | miércoles | jueves | viernes | sábado | domingo"),
        patterns=phrases(
            """
                {d} de {m} de {y} | {d} de {m} de {y} | {d} de {m} del {y} | el {o} de {m} de {y} |
                {d} {m} {y} | {d} de {m}, {y}
            """
        ),
        before=phrases(
            """
                factura del | vence el | fecha: | Madrid, a | nacido el | pagado el | pedido {n} del |
                antes del | recibido el | desde el
            """
        ),
        after=phrases("a las 10 | en Sevilla | (pagado) | por {n} EUR | por correo | según lo acordado"),
    ),
    "it": Language(
        months=spellings(
            """
                gennaio gen | febbraio feb | marzo mar | aprile apr | maggio mag | giugno giu |
                luglio lug | agosto ago | settembre set sett | ottobre ott | novembre nov | dicembre dic
            """
        ),
        weekdays=phrases("lunedì | martedì | mercoledì | giovedì | venerdì | sabato | domenica"),
        patterns=phrases("{o} {m} {y} | {d} {m} {y} | {d} {m} {y} | il {o} {m} {y} | {d} {m}, {y}"),
        before=phrases(
            """
                fattura del | scadenza: | data: | Roma, | nato il | pagato il | ordine {n} del |
                entro il | ricevuto il | dal
            """
        ),
        after=phrases("alle 10 | a Torino | (pagato) | per {n} EUR | per posta | come concordato"),
    ),
    "nl": Language(
        months=spellings(
            """
                januari jan | februari feb | maart mrt | april apr | mei | juni jun | juli jul |
                augustus aug | september sep sept | oktober okt | november nov | december dec
            """
        ),
        weekdays=phrases("maandag | dinsdag | woensdag | donderdag | vrijdag | zaterdag | zondag"),
        patterns=phrases("{d} {m} {y} | {d} {m} {y} | {o} {m} {y} | de {o} {m} {y} | {d} {m}, {y}"),
        before=phrases(
            """
                factuur van | vervalt op | datum: | Utrecht, | geboren op | betaald op | order {n} van |
                vóór | ontvangen op | vanaf
            """
        ),
        after=phrases("om 10 uur | in Delft | (betaald) | voor {n} EUR | per post | zoals afgesproken"),
    ),
    "pt": Language(
        months=spellings(
            """
                janeiro jan | fevereiro fev | março mar | abril abr | maio mai | junho jun | julho jul |
                agosto ago | setembro set | outubro out | novembro nov | dezembro dez
            """
        ),
        weekdays=phrases(
            """
                segunda-feira | terça-feira | quarta-feira | quinta-feira | sexta-feira | sábado |
                domingo
            """
        ),
        patterns=phrases(
            """
                {d} de {m} de {y} | {d} de {m} de {y} | {o} de {m} de {y} | {d} {m} {y} |
                {d} de {m}, {y}
            """
        ),
        before=phrases(
            """
                fatura de | vence em | data: | Lisboa, | nascido em | pago em | pedido {n} de | até |
                recebido em | desde
            """
        ),
        after=phrases("às 10 | no Porto | (pago) | por {n} EUR | pelo correio | como combinado"),
    ),
}

# Texts without a full date: numbers, codes, month names that mean something else, dates with a part missing.
# {n} a number of 1 to 5 digits, {p} a price, {t} a time, {a} two capitals, {d} a day, {o} an English ordinal,
# {m} a month, {w} a weekday, {y} a year of four digits.
NO_DATE = phrases(
    """
        call {n} {n} {n} | phone +49 30 {n}{n} | tel. 555-0{n} | fax: 0{n}-{n} | total {p} EUR |
        ${p} per hour | {p} kg | {n} pieces at {p} | part {a}-{n} | serial {a}{n}{a} | {a} {n}/{a} |
        invoice no. {n} | IBAN {a}{n} {n} {n} | version {n}.{n} | ticket #{n} | room {n}, floor {n} |
        page {n} of {n} | {t} to {t} | at {t} on {w} | {w} at {t} | every {w} | {w} morning | next {w} |
        tomorrow | yesterday | last week | no later than {t} | {n} % | score {n}:{n} | {n} x {n} cm |
        {n} Main Street | open 24/7 | 3/4 cup of sugar | chapter {n}, verse {n} | flight {a} {n} |
        route {n} to {n} | {m} | {m} {y} | {d} {m} | {m} {d} | the {o} of {m} | {m} {o} | {w}, {d} {m} |
        {w} the {o} | {y} | since {y} | {m} of {y} | in {m} | mid-{m} | end of {m} {y} | the {o} |
        {y} to {y} | Q{n} of {y} | summer {y} | week {n} | model year {y} | {y}-{y} | on the {o} floor |
        may I ask {n} questions | it may cost {p} | they march {n} km | Ms April Jones, ext. {n} |
        call June at {n} | August Meyer, room {n} | a mars bar for {p} | Mr March ordered {n} |
        a set of {n} | out of stock: {n} | ask Julio about {n} | we may march on |
        an august company of {n} | Dec Alpha {n} | Jan owes {p} | no date given | date unknown |
        undated | not yet dated | to be confirmed | n/a | none | - | ? | tbd | thank you for the order |
        please call me back | see the note below | as discussed | copy of the contract | ohne Datum |
        Zimmer {n} | Summe {p} EUR | Artikel {n} | bitte um Rückruf | um {t} Uhr | nächste Woche |
        sans date | la chambre {n} | total : {p} EUR | article {n} | à {t} | la semaine prochaine |
        sin fecha | habitación {n} | son {p} EUR | a las {t} | la semana que viene | senza data |
        camera {n} | sono {p} EUR | alle {t} | la settimana prossima | zonder datum | kamer {n} |
        samen {p} EUR | om {t} | volgende week | sem data | quarto {n} | custa {p} EUR | às {t} |
        na próxima semana
    """
)
