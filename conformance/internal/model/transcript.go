package model

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// lines is how many lines of a transcript are steps.
const lines = 11

// Transcript writes a history and what came of it for people: a line of the shape and one for each of the last calls.
// The judge gave v at the last outcome.
func Transcript(h *History, outcomes []Outcome, v *Violation) []string {
	t := &reporter{h: h, names: map[Key]int{}}
	h.each(t.name)
	out := []string{"caches: " + t.shape()}
	if note := t.near(); note != "" {
		out = append(out, note)
	}
	var calls []string
	for i, o := range outcomes {
		for n := range o.Results {
			number := fmt.Sprint(i + 1)
			if len(o.Results) > 1 {
				number += string(rune('a' + min(n, 25)))
			}
			mark := ""
			if i == len(outcomes)-1 && n == v.Call {
				mark = "   <- allowed: " + t.renamed(v.Allowed)
			}
			calls = append(calls, fmt.Sprintf("%3s %s -> %s%s", number, t.call(&h.Steps[i][n]), t.result(&h.Steps[i][n], &o.Results[n]), mark))
		}
	}
	if more := len(calls) - lines; more > 0 {
		out = append(out, fmt.Sprintf("    ... %d calls before", more))
		calls = calls[more:]
	}
	return append(out, calls...)
}

// Says is what a violation says, with the blocks named as in the transcript.
func Says(h *History, v *Violation) string {
	t := &reporter{h: h, names: map[Key]int{}}
	h.each(t.name)
	return v.Rule + ": " + t.renamed(v.Text)
}

// Allows is what a violation says would have been right, with the blocks named as in the transcript.
func Allows(h *History, v *Violation) string {
	t := &reporter{h: h, names: map[Key]int{}}
	h.each(t.name)
	return t.renamed(v.Allowed)
}

// reporter names blocks by the order in which they come.
type reporter struct {
	h     *History
	names map[Key]int
}

func (t *reporter) name(c *Call) {
	for _, keys := range append([][]Key{c.Keys}, keysOf(c.Queries)...) {
		for _, k := range keys {
			if t.names[k] == 0 {
				t.names[k] = len(t.names) + 1
			}
		}
	}
}

func keysOf(queries []Query) (out [][]Key) {
	for _, q := range queries {
		out = append(out, q.Keys)
	}
	return out
}

// renamed puts the transcript's names in the place of the judge's, b and the number of a key.
func (t *reporter) renamed(text string) string {
	var b strings.Builder
	for rest := text; rest != ""; {
		at := strings.IndexByte(rest, 'b')
		if at < 0 {
			b.WriteString(rest)
			break
		}
		digits := 0
		for at+1+digits < len(rest) && rest[at+1+digits] >= '0' && rest[at+1+digits] <= '9' {
			digits++
		}
		word := at > 0 && (rest[at-1] >= 'a' && rest[at-1] <= 'z' || rest[at-1] >= '0' && rest[at-1] <= '9')
		var number int
		if digits > 0 && !word {
			_, _ = fmt.Sscan(rest[at+1:at+1+digits], &number)
		}
		b.WriteString(rest[:at])
		if known := t.names[Key(number-1)]; number > 0 && known > 0 {
			fmt.Fprintf(&b, "b%d", known)
		} else {
			b.WriteString(rest[at : at+1+digits])
		}
		rest = rest[at+1+digits:]
	}
	return b.String()
}

func (t *reporter) shape() string {
	s := &t.h.Shape
	var parts []string
	for n, g := range s.Groups {
		what := count(g.Segments, "segment") + " of together " + size(g.Bytes) + " a block"
		if len(s.Groups) > 1 {
			what = fmt.Sprintf("group %d has %s", n, what)
		}
		if g.Cut == CutEqual {
			what += ", all of one length,"
		}
		if g.Cut == CutTiny {
			what += ", some of a few bytes,"
		}
		if g.Trailing > 0 {
			what += fmt.Sprintf(" and needs the last %d", g.Trailing)
		}
		parts = append(parts, what)
	}
	out := count(s.Ranks, "rank") + "; " + strings.Join(parts, "; ")
	if s.Tokens > 0 {
		out += "; " + count(s.Tokens, "token") + " a block"
	}
	if s.Gaps {
		out += "; gaps between blocks"
	}
	return out
}

// near says which keys look alike.
func (t *reporter) near() string {
	var parts []string
	for k, n := range t.h.Keys {
		if own, of := t.names[Key(k)], t.names[n.Of]; n.Share > 0 && own > 0 && of > 0 {
			end := "first"
			if n.Last {
				end = "last"
			}
			parts = append(parts, fmt.Sprintf("b%d and b%d the %s %d bytes", of, own, end, n.Share))
		}
	}
	if len(parts) == 0 || len(parts) > 3 {
		return ""
	}
	return "keys share bytes: " + strings.Join(parts, ", ")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func size(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}

// list names blocks, those in a row by the first and the last.
func (t *reporter) list(keys []Key, version int) string {
	var parts []string
	mark := strings.Repeat("'", version)
	for i := 0; i < len(keys); {
		to := i + 1
		for to < len(keys) && t.names[keys[to]] == t.names[keys[to-1]]+1 {
			to++
		}
		switch to - i {
		case 1, 2:
			to = i + 1
			parts = append(parts, fmt.Sprintf("b%d%s", t.names[keys[i]], mark))
		default:
			parts = append(parts, fmt.Sprintf("b%d%s..b%d%s", t.names[keys[i]], mark, t.names[keys[to-1]], mark))
		}
		i = to
	}
	const most = 12
	if len(parts) > most {
		parts = append(parts[:most], fmt.Sprintf("... (%d blocks)", len(keys)))
	}
	return strings.Join(parts, " ")
}

func (t *reporter) call(c *Call) string {
	var b strings.Builder
	switch c.Kind {
	case Save:
		b.WriteString("save " + t.list(c.Keys, c.Version))
	case Load:
		b.WriteString("load " + t.list(c.Keys, 0))
	case Match:
		t.queries(&b, c.Queries)
	default:
		b.WriteString([]string{Reset: "reset", Reopen: "close and open the sides", Wait: "wait", Restart: "end and start the connector", Kill: "kill and start the connector"}[c.Kind])
	}
	for _, part := range []struct {
		is   bool
		text string
	}{
		{c.Tail, " and a partial block"},
		{c.Replace, ", Replace"},
		{slices.ContainsFunc(c.Skip, func(n int) bool { return n > 0 }), fmt.Sprintf(", without the first %v of the groups", c.Skip)},
		{c.Tenant > 0, fmt.Sprintf(", tenant %d", c.Tenant)},
		{c.Kind == Wait, fmt.Sprintf(" for %v", c.Cancel)},
		{c.Only > 0, fmt.Sprintf(", only on rank %d", c.Only-1)},
		{c.Engine > 0, ", engine 2"},
		{c.After > 0, fmt.Sprintf(", %v later", c.After)},
		{c.Cancel > 0 && c.Kind != Kill && c.Kind != Wait, fmt.Sprintf(", cancelled after %v", c.Cancel.Round(10*time.Microsecond))},
		{c.Cancel < 0, ", cancelled before"},
	} {
		if part.is {
			b.WriteString(part.text)
		}
	}
	return b.String()
}

func (t *reporter) queries(b *strings.Builder, queries []Query) {
	const most = 4
	b.WriteString("match ")
	for i, q := range queries[:min(most, len(queries))] {
		if i > 0 {
			b.WriteString(" | ")
		}
		b.WriteString(cmp.Or(t.list(q.Keys, 0), "nothing"))
		if q.Computed > 0 {
			fmt.Fprintf(b, " behind %d", q.Computed)
		}
		if q.Probe {
			b.WriteString(" as a probe")
		}
	}
	if more := len(queries) - most; more > 0 {
		fmt.Fprintf(b, " | ... (%d queries)", len(queries))
	}
}

func (t *reporter) result(c *Call, res *Result) string {
	switch {
	case res.Late != "":
		return "nothing"
	case res.Err != nil:
		return short(res.Err)
	case c.Kind == Match:
		blocks := make([]string, min(len(res.Answers), 12))
		for i := range blocks {
			blocks[i] = fmt.Sprint(res.Answers[i] / BlockTokens)
			if res.Answers[i]%BlockTokens != 0 {
				blocks[i] = fmt.Sprintf("%d tokens", res.Answers[i])
			}
		}
		return strings.Join(blocks, " | ")
	case c.Kind == Reset && !res.Emptied:
		return "not emptied"
	}
	return t.moved(c, res)
}

// moved says what came of a transfer, of the ranks together.
func (t *reporter) moved(c *Call, res *Result) string {
	refs := c.Blocks(&t.h.Shape)
	var said []string
	for rank := range res.Ranks {
		m := &res.Ranks[rank]
		if !m.Called {
			continue
		}
		text := "ok"
		switch {
		case m.Whole:
			text = short(m.Err)
		case m.Err != nil:
			text = fmt.Sprintf("ok except %s: %s", t.failed(refs, m), short(m.Err))
		}
		if found := t.found(refs, m, rank); found != "" {
			text += ", " + found
		}
		if !slices.Contains(said, text) {
			said = append(said, text)
		}
	}
	if len(said) == 0 {
		return "ok"
	}
	return strings.Join(said, "; another rank: ")
}

func (t *reporter) failed(refs []Ref, m *Moved) string {
	var keys []Key
	tail := false
	for n, ref := range refs {
		if m.failed(n) && ref.Tail {
			tail = true
		} else if m.failed(n) {
			keys = append(keys, ref.Key)
		}
	}
	out := t.list(unique(keys), 0)
	if tail {
		out = strings.TrimSpace(out + " the partial block")
	}
	return out
}

// found says what lies in blocks, where there is more than one answer.
func (t *reporter) found(refs []Ref, m *Moved, rank int) string {
	const most = 3
	versions := t.h.Versions()
	var parts []string
	for n, f := range m.Found {
		ref := refs[n]
		own := fmt.Sprintf("b%d", t.names[ref.Key])
		if m.failed(n) || ref.Tail {
			continue
		}
		if f.What == Exact && f.Ref == ref && f.Rank == rank {
			if versions > 1 {
				parts = append(parts, "with "+version(own, f.Version))
			}
			continue
		}
		switch f.What {
		case Exact:
			from := version(fmt.Sprintf("b%d", t.names[f.Ref.Key]), f.Version)
			if f.Ref.Group != ref.Group {
				from += fmt.Sprintf(" of group %d", f.Ref.Group)
			}
			if f.Rank != rank {
				from += fmt.Sprintf(" of rank %d", f.Rank)
			}
			parts = append(parts, own+" has "+from)
		default:
			parts = append(parts, own+[]string{Untouched: " was not written", Torn: " is torn", Digest: " has other digests", Unknown: " has other bytes"}[f.What])
		}
	}
	if len(parts) > most {
		parts = append(parts[:most], fmt.Sprintf("and %d more", len(parts)-most))
	}
	return strings.Join(parts, ", ")
}

// short is the first line of an error, cut.
func short(err error) string {
	for _, known := range []error{connector.ErrGone, connector.ErrBusy, connector.ErrCorrupt, connector.ErrOutdated, connector.ErrDeclined} {
		if errors.Is(err, known) {
			return "error " + known.Error()
		}
	}
	const most = 80
	text, _, _ := strings.Cut(err.Error(), "\n")
	if len(text) > most {
		text = text[:most] + "..."
	}
	return "error " + text
}
