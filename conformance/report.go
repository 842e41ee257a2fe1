package conformance

import (
	"cmp"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/docs"
)

// textLines is how many lines of what a case says WriteCase shows, and wordsLines how many of a dead process.
const textLines, wordsLines = 5, 12

// WriteText writes results for people: each as WriteCase does, and a summary.
func WriteText(w io.Writer, results []Result) error {
	for _, r := range results {
		if err := WriteCase(w, r); err != nil {
			return err
		}
	}
	return WriteSummary(w, results)
}

// WriteCase writes one result for people: a line, and the reasons below it if the case did not pass. Of long
// reasons it shows the first lines; WriteJSON has all.
// A case of a power that the connector does not offer, and that nobody has asked for, has its line in the summary. So has one whose server is
// away, apart from the first, until it has run for the last time.
func WriteCase(w io.Writer, r Result) error {
	if r.unasked && r.Status == Skip || r.away != "" && r.Again && !r.noticed {
		return nil
	}
	var b strings.Builder
	if r.Of > 0 {
		of := fmt.Sprint(r.Of)
		fmt.Fprintf(&b, "%*d/%s  %-11s  ", len(of), r.Number, of, timeLeft(r.Left))
	}
	fmt.Fprintf(&b, "%-4s  %-10s  %-20s  %s", r.Status, r.Rule, r.ID, r.Text)
	if r.Status == Skip && len(r.Log) == 1 { // most are of powers that the connector does not have
		fmt.Fprintf(&b, " (%s)\n", r.Log[0])
	} else {
		b.WriteByte('\n')
		writeLines(&b, r.Log, textLines)
	}
	writeLines(&b, r.Transcript, len(r.Transcript))
	writeLines(&b, r.LastWords, wordsLines)
	writeLines(&b, r.Stacks, textLines)
	if r.Again {
		fmt.Fprintf(&b, "      it will run again when the other cases have ended\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// writeLines writes the first lines of some messages.
func writeLines(b *strings.Builder, messages []string, most int) {
	lines := strings.Split(strings.Join(messages, "\n"), "\n")
	if len(messages) == 0 {
		return
	}
	for _, line := range lines[:min(most, len(lines))] {
		fmt.Fprintf(b, "      %s\n", line)
	}
	if more := len(lines) - most; more > 0 {
		fmt.Fprintf(b, "      ... and %d lines more, see --format json\n", more)
	}
}

// timeLeft says for people how long the rest of a run takes; empty if that is not known, or nothing is left.
func timeLeft(d time.Duration) string {
	if d < time.Second {
		return ""
	}
	return d.Round(time.Second).String() + " left"
}

// broadRules are those that a connector with any serious fault breaks as well, the broadest last.
func broadRules() []string {
	return []string{"FAULT-01", "WORK-05", "STORE-01", "WORK-01", "WORK-07", "OPEN-01"}
}

// breadth orders rules from the specific to the broad, because a specific rule names the fault better.
func breadth(rule string) int { return slices.Index(broadRules(), rule) }

// precedence orders what failed: first the case without which no other can be judged.
func precedence(r Result) int {
	if isBasic(r) {
		return -2 // before every breadth
	}
	return breadth(r.Rule)
}

// WriteSummary writes for people what failed or was inconclusive, in six lines at most for each case: what failed first, the most specific
// rule first, but before all the case without which no other can be judged; which cases did not run although a profile asks for them; for how
// long the cases of each profile ran; and how many cases had each status.
func WriteSummary(w io.Writer, results []Result) error {
	var b strings.Builder
	count := map[Status]int{}
	var wrong []Result
	for _, r := range results {
		count[r.Status]++
		if r.Status == Fail || r.Status == Inconclusive && r.away == "" {
			wrong = append(wrong, r)
		}
	}
	slices.SortStableFunc(wrong, func(x, y Result) int {
		return cmp.Or(cmp.Compare(doubt(x), doubt(y)), cmp.Compare(precedence(x), precedence(y)))
	})
	if len(wrong) > 0 {
		b.WriteString("These did not pass:\n")
	}
	for n, r := range wrong {
		writeWrong(&b, r)
		if n == 0 && isBasic(r) && len(wrong) > 1 {
			fmt.Fprintf(&b, "Mend that first. Most of the cases below do the same and more, so that they cannot be judged before %s passes:\n", r.ID)
		}
	}
	writeExcused(&b, results)
	writeUnasked(&b, results)
	writeAway(&b, results)
	writeUndecided(&b, results)
	writeSeconds(&b, results)
	fmt.Fprintf(&b, "%d passed, %d failed, %d skipped", count[Pass], count[Fail], count[Skip])
	if n := count[Inconclusive]; n > 0 {
		fmt.Fprintf(&b, ", %d inconclusive", n)
	}
	_, err := io.WriteString(w, b.String()+"\n")
	return err
}

// writeExcused names the cases that the machine or the config kept from running, so that nobody takes them for passed.
func writeExcused(b *strings.Builder, results []Result) {
	var reasons []string
	cases := map[string][]string{}
	for _, r := range results {
		if r.Status != Skip || !r.excused {
			continue
		}
		reason := strings.Join(r.Log, "; ")
		if cases[reason] == nil {
			reasons = append(reasons, reason)
		}
		cases[reason] = append(cases[reason], r.ID)
	}
	for _, reason := range reasons {
		fmt.Fprintf(b, "These did not run, since %s: %s\n", reason, strings.Join(cases[reason], ", "))
	}
}

// writeUnasked says in one line which powers the connector does not offer, where nobody has asked for their cases.
func writeUnasked(b *strings.Builder, results []Result) {
	var powers []string
	count := 0
	for _, r := range results {
		if r.Status != Skip || !r.unasked || len(r.Log) == 0 {
			continue
		}
		count++
		if power := strings.TrimPrefix(r.Log[0], notOffered); !slices.Contains(powers, power) {
			powers = append(powers, power)
		}
	}
	if count > 0 {
		fmt.Fprintf(b, "Not asked for, and not offered by the connector: %s (%d cases)\n", strings.Join(powers, ", "), count)
	}
}

// writeAway says once which server was away, and which cases could not run for that.
func writeAway(b *strings.Builder, results []Result) {
	var ids []string
	var why string
	for _, r := range results {
		if r.Status == Inconclusive && r.away != "" {
			ids, why = append(ids, r.ID), cmp.Or(why, r.away)
		}
	}
	if len(ids) > 0 {
		fmt.Fprintf(b, "These did not run, since %s, which says nothing of the connector: %s\n", why, strings.Join(ids, ", "))
	}
}

// writeUndecided names the cases that a profile requires and that stayed inconclusive: the run is no proof of the profile.
func writeUndecided(b *strings.Builder, results []Result) {
	var ids []string
	for _, r := range results {
		if r.Status == Inconclusive && len(r.Profiles) > 0 && !r.optional {
			ids = append(ids, r.ID)
		}
	}
	if len(ids) > 0 {
		fmt.Fprintf(b, "These are required and have no verdict: %s\n", strings.Join(ids, ", "))
	}
}

// writeSeconds says for how long the cases of each profile of the run ran. A case of two profiles counts for both.
func writeSeconds(b *strings.Builder, results []Result) {
	var parts []string
	for _, p := range Profiles() {
		var sum time.Duration
		for _, r := range results {
			if slices.Contains(r.Profiles, p) {
				sum += r.Took
			}
		}
		if sum > 0 {
			parts = append(parts, fmt.Sprintf("%s %.1f", p, sum.Seconds()))
		}
	}
	if len(parts) > 0 {
		fmt.Fprintf(b, "Seconds of each profile: %s\n", strings.Join(parts, ", "))
	}
}

// doubt orders what failed before what is inconclusive.
func doubt(r Result) int {
	if r.Status == Inconclusive {
		return 1
	}
	return 0
}

// writeWrong tells about a case that did not pass what was done, what came, what was allowed, the rule, and what to look at.
func writeWrong(b *strings.Builder, r Result) {
	fmt.Fprintf(b, "%-4s  %-10s  %-20s  %s\n", r.Status, r.Rule, r.ID, r.Text)
	line := func(what, text string) {
		text, _, _ = strings.Cut(text, "\n")
		if text != "" {
			fmt.Fprintf(b, "        %-9s %s\n", what, text)
		}
	}
	if r.required != "" { // it did not run, so that no mistake can be named
		line("came:", r.Log[0])
		line("allowed:", "a pass: "+r.required)
		line("look at:", "what the connector offers, its config, or leave out the profile")
		return
	}
	if len(r.Log) > 0 {
		line("came:", strings.TrimPrefix(r.Log[0], r.Rule+": "))
	}
	line("died:", death(r.LastWords))
	if len(r.LastWords) == 0 {
		line("hung:", hangsAt(r.Stacks))
	}
	line("allowed:", r.Allowed)
	if rule := docs.Rule(r.Rule); rule != r.Text {
		line("rule:", rule)
	}
	if r.Status == Fail {
		line("look at:", strings.Join(docs.Mistakes(r.Rule), "; "))
	}
}

// death says in one line how a connector's process ended by itself, and the line of its standard error that says why; empty if it lives.
func death(words []string) string {
	if len(words) == 0 {
		return ""
	}
	ended, _, _ := strings.Cut(words[0], "; the last lines")
	said := words[1:]
	why := slices.IndexFunc(said, func(line string) bool {
		line = strings.TrimSpace(line)
		return strings.HasPrefix(line, "fatal error:") || strings.HasPrefix(line, "panic:")
	})
	if len(said) == 0 {
		return ended
	}
	return ended + ": " + strings.TrimSpace(said[max(why, 0)])
}

// hangsAt is where a connector's process hung, in one line; empty if that is not known, or it did not.
func hangsAt(stacks []string) string {
	if len(stacks) < 2 {
		return ""
	}
	return strings.TrimSpace(stacks[1])
}

// WriteJSON writes results as JSON Lines with id, rule, status and log; with the number of the case among so
// many, if they are known, with the last words of a connector's process, and where it was if it had to be killed.
func WriteJSON(w io.Writer, results []Result) error {
	enc := json.NewEncoder(w)
	for _, r := range results {
		row := struct {
			ID        string   `json:"id"`
			Rule      string   `json:"rule"`
			Status    Status   `json:"status"`
			Log       []string `json:"log"`
			History   []string `json:"history,omitempty"`
			Allowed   string   `json:"allowed,omitempty"`
			LastWords []string `json:"last_words,omitempty"`
			Stacks    []string `json:"stacks,omitempty"`
			Number    int      `json:"n,omitempty"`
			Of        int      `json:"of,omitempty"`
		}{r.ID, r.Rule, r.Status, append([]string{}, r.Log...), r.Transcript, r.Allowed, r.LastWords, r.Stacks, r.Number, r.Of}
		if err := enc.Encode(row); err != nil {
			return err
		}
	}
	return nil
}

type junitSuite struct {
	XMLName  xml.Name    `xml:"testsuite"`
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Errors   int         `xml:"errors,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Name    string        `xml:"name,attr"`
	Class   string        `xml:"classname,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitMessage `xml:"failure,omitempty"`
	Error   *junitMessage `xml:"error,omitempty"`
	Skipped *junitMessage `xml:"skipped,omitempty"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes results as a JUnit test suite of that name. A case that is inconclusive is an error there.
func WriteJUnit(w io.Writer, name string, results []Result) error {
	suite := junitSuite{Name: name, Tests: len(results)}
	var total float64
	for _, r := range results {
		c := junitCase{Name: r.ID, Class: r.Rule, Time: fmt.Sprintf("%.3f", r.Took.Seconds())}
		total += r.Took.Seconds()
		message := &junitMessage{Message: r.Text, Text: strings.Join(slices.Concat(r.Log, r.Transcript, r.LastWords, r.Stacks), "\n")}
		switch r.Status {
		case Fail:
			suite.Failures++
			c.Failure = message
		case Inconclusive:
			suite.Errors++
			c.Error = message
		case Skip:
			suite.Skipped++
			c.Skipped = message
		case Pass:
		}
		suite.Cases = append(suite.Cases, c)
	}
	suite.Time = fmt.Sprintf("%.3f", total)
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	enc := xml.NewEncoder(w)
	enc.Indent("", "  ")
	if err := enc.Encode(suite); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}
