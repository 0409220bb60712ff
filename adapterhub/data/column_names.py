"""Usual column names of public data sets, by the content of the columns.

Names are compared in lower case and without punctuation: "Review Text" is "reviewtext".
"""

from __future__ import annotations

# In each list, earlier names are preferred to later ones.
TEXTS = (
    ("text",),
    ("sentence", "review", "content", "document", "comment", "message", "tweet", "utterance",
     "passage", "article", "post", "paragraph", "statement", "phrase", "snippet", "abstract",
     "dialogue", "reviewtext", "reviewbody", "reviewcontent", "commenttext", "texts", "sentences",
     "reviews", "comments", "messages", "tweets", "tweettext", "sms", "email", "headline",
     "feedback", "transcript", "complaint", "body", "description", "input", "query", "question",
     "source"),
    ("title", "subject", "summary"),
)  # fmt: skip
TITLES = ("title", "headline", "subject")
BODIES = ("body", "description", "abstract", "content", "selftext", "article", "reviewbody")
CLASSES = (
    ("label", "labels"),
    ("class", "category", "target", "sentiment", "intent", "topic", "emotion", "polarity", "tag",
     "labelname", "labeltext", "goldlabel", "gold", "stars", "rating", "classes", "categories",
     "airlinesentiment", "spam", "isspam", "toxic", "toxicity", "hate", "y", "output",
     "answer", "classlabel", "annotation", "stance"),
    ("score", "grade", "type"),
)  # fmt: skip
NUMBERS = (
    ("label", "labels"),
    ("score", "target", "rating", "stars", "value", "similarity", "similarityscore", "y", "grade",
     "price", "sentiment", "relevance", "overall"),
)  # fmt: skip
TARGETS = (
    ("label", "target"),
    ("response", "completion", "output", "answer", "summary", "highlights", "translation",
     "targettext", "tgt", "reference", "chosen", "assistant"),
)  # fmt: skip
PICTURES = (
    ("image", "picture", "photo", "img"),
    ("file", "filename", "path", "filepath", "imagefile", "imagepath", "imagename"),
)
SOUNDS = (
    ("audio", "sound", "recording", "speech", "clip", "wav"),
    ("file", "filename", "path", "filepath", "audiofile", "audiopath", "audiofilepath", "wavfile"),
)
TRANSCRIPTS = (
    ("text", "transcription", "transcript"),
    ("sentence", "label", "target", "rawtranscription", "rawtext", "utterance", "caption"),
)
ASKED = (("question",), ("prompt", "instruction", "query"), ("text", "input"))
REPLIES = (
    ("answer",),
    ("label", "response", "caption", "completion", "output", "target", "description"),
    ("text", "sentence"),
)
CAPTIONS = (("caption", "prompt"), ("text", "description"), ("label", "title"))
PROMPTS = (
    ("text",),
    ("prompt", "instruction", "question", "input", "source", "sourcetext", "src", "document",
     "article", "dialogue", "user", "query"),
    *TEXTS[1:],
)  # fmt: skip
TOKENS = (("tokens", "words"), ("text", "sentence"))
TAGS = (
    ("label", "labels", "nertags", "tags", "ner"),
    ("bio", "biotags", "iob", "postags", "upos", "xpos", "pos"),
)
QUESTIONS = (("question",), ("text", "query"))
CONTEXTS = (("context",), ("passage", "paragraph", "document"))
ANSWERS = (("answers",), ("answer", "label"))
ANCHORS = (("anchor",), ("query", "question", "sentence1", "text1", "question1", "premise",
                         "string1", "1string", "s1", "sent1", "claim", "sentence",
                         "text"))  # fmt: skip
POSITIVES = (("positive", "pos"), ("passage", "answer", "document", "context", "sentence2", "text2",
                                   "question2", "hypothesis", "string2", "2string", "s2", "sent2",
                                   "evidence", "duplicate", "response", "pair"))  # fmt: skip
PREFERRED = (("chosen",), ("preferred", "accepted", "better", "win", "chosenresponse",
                           "responsechosen", "preferredresponse", "responsej"))  # fmt: skip
REJECTED = (("rejected",), ("dispreferred", "worse", "lose", "rejectedresponse",
                            "responserejected", "dispreferredresponse", "responsek"))  # fmt: skip
# A response with a mark, as in rows for KTO: the mark is true or false.
RESPONSES = (("completion",), ("response", "output", "answer", "reply", "generation", "text",
                               "assistant", "generated"),
             ("messages", "conversations", "conversation", "chat"))  # fmt: skip
LIKED = (("label",), ("liked", "desirable", "ktotag", "thumbsup", "upvoted", "feedback", "rating",
                      "score"))  # fmt: skip
# What a reward compares a generated text with, or runs with it.
SOLUTIONS = (("answer",), ("label", "solution", "target", "groundtruth", "finalanswer", "response",
                           "completion", "output", "reference", "gold"))  # fmt: skip
UNIT_TESTS = (("tests",), ("test", "testlist", "unittests", "unittest", "testcases", "assertions",
                           "asserts", "label"))  # fmt: skip
# Prompts of comparisons: texts, or the beginnings of chats.
ASKINGS = (
    ("prompt",),
    ("instruction", "question", "input", "query", "text", "user", "ask", "asking", "request",
     "problem", "userprompt", "userinput", "userquery", "prompttext", "instructions"),
    ("conversations", "conversation", "messages", "chat", "dialog", "dialogue", "history",
     "context", "document", "article", "post", "passage", "sourcetext", "content"),
)  # fmt: skip
SYSTEMS = ("system", "systemprompt", "systemmessage")
NEGATIVE = r"(hard)?neg(ative)?s?\d*"
STEMS = (
    ("text",),
    ("ctx", "startphrase", "goal", "questionstem"),
    ("question", "context", "prompt", "sentence", "premise", "sent1", "query"),
)
CHOSEN = (("label",), ("answeridx",),
          ("answer", "answerkey", "correct", "target", "gold", "correctanswer", "cop",
           "correctoption", "correctchoice", "correctanswernum", "correctanswerid", "goldlabel",
           "rightanswer"))  # fmt: skip
# Columns with the context of a question with choices, which is read before it.
ABOUT = ("context", "passage", "article", "paragraph", "premise", "story", "document", "support",
         "para", "florespassage")  # fmt: skip
CHOICE_COLUMNS = ("choice", "option", "ending", "answer", "sol", "op", "opt", "candidate", "ans",
                  "mcanswer")  # fmt: skip
# Columns with one wrong choice each, next to a column with the right choice.
WRONG_COLUMNS = ("distractor", "incorrectanswer", "wronganswer", "incorrectchoice")
RIGHT_COLUMNS = ("correctanswer", "rightanswer", "bestanswer", "correctchoice", "answer")
CHOICES = (("choices",), ("options", "endings", "answers", "candidates", "choice",
                          "answeroptions"))  # fmt: skip
# Parts of questions, by substrings of their column names.
ANSWER_PARTS = ("answer", "choice", "option", "distractor", "solution")
QUESTION_PARTS = ("context", "passage", "paragraph", "document", "story", "article", "dialog",
                  "plot", "background", "situation")  # fmt: skip
PAIRS = (
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("text1", "text2"), ("texta", "textb"), ("sentencea", "sentenceb"), ("question", "sentence"),
    ("question", "passage"), ("query", "document"), ("query", "passage"), ("1string", "2string"),
    ("string1", "string2"), ("s1", "s2"), ("sent1", "sent2"), ("question", "context"),
    ("claim", "evidence"),
)  # fmt: skip
# Columns that number, date or locate a row: never inferred as a text or label.
_NEVER = (
    "id ids idx index no nr number rowid uid guid uuid key date time datetime timestamp created "
    "createdat updated year month day url link href path file filename image source1 source2 split "
    "fold user userid username author name email lang unnamed0 oldindex lineno row productid "
    "reviewid postid tweetid docid textid sentenceid pairid promptid lat lon"
)
NEVER = frozenset(_NEVER.split())
_LISTS = (TEXTS, CLASSES, NUMBERS, TARGETS, PROMPTS, TOKENS, TAGS, QUESTIONS, CONTEXTS, ANSWERS,
          STEMS, CHOSEN, CHOICES, ANCHORS, POSITIVES, ASKINGS, RESPONSES, LIKED, PICTURES, SOUNDS,
          TRANSCRIPTS, ASKED, REPLIES, CAPTIONS)  # fmt: skip
KNOWN = frozenset(
    {name for names in _LISTS for tier in names for name in tier}
    | {name for pair in PAIRS for name in pair}
    | set(NEVER - {"no", "day", "name", "row", "key"})
)
