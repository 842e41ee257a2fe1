package conformance

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// WriteText writes results for people: one line a case, the reasons below those that did not pass,
// and the counts at the end.
func WriteText(w io.Writer, results []Result) error {
	var b strings.Builder
	count := map[Status]int{}
	for _, r := range results {
		count[r.Status]++
		fmt.Fprintf(&b, "%-4s  %-10s  %-20s  %s\n", r.Status, r.Rule, r.ID, r.Text)
		for _, line := range r.Log {
			fmt.Fprintf(&b, "      %s\n", strings.ReplaceAll(line, "\n", "\n      "))
		}
	}
	fmt.Fprintf(&b, "%d passed, %d failed, %d skipped\n", count[Pass], count[Fail], count[Skip])
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes results as JSON Lines with id, rule, status and log.
func WriteJSON(w io.Writer, results []Result) error {
	enc := json.NewEncoder(w)
	for _, r := range results {
		row := struct {
			ID     string   `json:"id"`
			Rule   string   `json:"rule"`
			Status Status   `json:"status"`
			Log    []string `json:"log"`
		}{r.ID, r.Rule, r.Status, append([]string{}, r.Log...)}
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
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	Name    string        `xml:"name,attr"`
	Class   string        `xml:"classname,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitMessage `xml:"failure,omitempty"`
	Skipped *junitMessage `xml:"skipped,omitempty"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes results as a JUnit test suite of that name.
func WriteJUnit(w io.Writer, name string, results []Result) error {
	suite := junitSuite{Name: name, Tests: len(results)}
	var total float64
	for _, r := range results {
		c := junitCase{Name: r.ID, Class: r.Rule, Time: fmt.Sprintf("%.3f", r.Took.Seconds())}
		total += r.Took.Seconds()
		message := &junitMessage{Message: r.Text, Text: strings.Join(r.Log, "\n")}
		switch r.Status {
		case Fail:
			suite.Failures++
			c.Failure = message
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
