package archtest

import "regexp"

// phrase is wording that a native reader stumbles over.
type phrase struct {
	key     string         // a part of every match: text without it is not searched
	pattern *regexp.Regexp // the wording
	unless  *regexp.Regexp // what follows a match that is good English; nil when nothing excuses it
	instead string         // what to write
}

// phrases lists what comments, messages and pages do not say. A pattern belongs here if nearly every
// match reads badly: a precise pattern helps whoever writes, a vague one only annoys.
func phrases() []phrase {
	list := []struct{ key, pattern, unless, instead string }{
		{"new", `\b[Aa]new\b`, "", "again"},
		{"for", `\b[Bb]ut\s+for\b`, `^\s+(?:a|the)\s+(?:moment|while|time)\b`, "except"},
		{"esides", `\b[Bb]esides\b`, "", "also, in addition to, apart from"},
		{"wants", `\bwants\b`, "", "requires, needs, asks for"},
		{"still", `\b(?:stands?|stood|standing)\s+still\b`, "", "stalls, stops"},
		{"needs", `\bneeds\s+not\b`, "", "need not, does not need to"},
		{"more", `\bno\s+more[.,;:)]`, "", "no longer, not any more"},
		{"Who", `(?:^|[.;:]\s|\n\s*\n)Who\s[^.?]*\.`, "", "whoever, whichever, or the noun"},
		{"who", `\b(?:for|by|to|from|with|than|tells?)\s+who\b`, "", "whoever, those who, or the noun"},
		{"o many", `\b[Ss]o\s+many\b`, `^\s+(?:that|as)\b`, "that many, as many as, the number"},
		{"o often", `\b[Ss]o\s+often\b`, `^\s+(?:that|as)\b`, "that often, as often as, the number of times"},
		{"o much", `\b[Ss]o\s+much\b`, `^\s+(?:that|as)\b`, "that much, as much as"},
		{"hat of", `\b[Ww]hat\s+of\b`, "", "which part of, what in"},
		{"of", `\b(?:[Ss]ays?|[Tt]ells?|[Tt]old|[Hh]ears?)\s+of\b`, "", "says about, is told about, learns of"},
		{"stand", `\bstands?\s+(?:in|on|there|before|beside|behind)\b`, `^\s+its\s+own\b`, "is in, comes before"},
		{"in line", `\b(?:stood|standing)\s+in\s+line\b`, "", "waits for"},
		{"twice", `\bis\s+there\s+twice\b`, "", "appears twice"},
		{"is no", `\b(?:is|are)\s+no\s+(?:multiple|number|name|tag|key|power|seed|error|list|connector|plugin|ticket|file|folder|address|integer|prefix)\b`, "", "is not a"},
		{"vain", `\bin\s+vain\b`, "", "without success, for nothing"},
		{"'s", `\bof\s+its\s+user's\b`, "", "that the caller provides"},
		{"is to", `\bis\s+to\s+(?:stay|be)\b`, "", "stays, must be"},
		{"go on", `\blets?\s+go\s+on\b`, "", "lets it continue"},
	}
	phrases := make([]phrase, 0, len(list))
	for _, p := range list {
		one := phrase{key: p.key, pattern: regexp.MustCompile(p.pattern), instead: p.instead}
		if p.unless != "" {
			one.unless = regexp.MustCompile(p.unless)
		}
		phrases = append(phrases, one)
	}
	return phrases
}

// dialect maps parts of private names to the field's word. A name such as newsDesk has the parts news
// and desk.
func dialect() map[string]string {
	return map[string]string{
		"house":  "session, the children of one engine",
		"guest":  "session, process",
		"nest":   "children, composite",
		"desk":   "event queue",
		"teller": "poller, reporter",
		"office": "signer",
		"duty":   "obligation",
		"duties": "obligations",
		"dice":   "rng",
		"pulse":  "heartbeat",
		"heirs":  "descendants",
		"strike": "kill",
		"shun":   "quarantine",
	}
}
