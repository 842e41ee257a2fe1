package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode"
)

// status is the outcome of one check.
type status string

// The outcomes.
const (
	statusOK   status = "ok"
	statusWarn status = "warn" // works, with the limits that the detail names
	statusFail status = "fail"
)

// check is a line of doctor and of plugins verify.
type check struct {
	Check  string `json:"check"`
	Status status `json:"status"`
	Detail string `json:"detail"`
	Mend   string `json:"mend,omitempty"` // what to do; set unless all is well
}

// checkFormat refuses other values of --format.
func checkFormat(format string) error {
	if format != "text" && format != "json" {
		return fmt.Errorf("--format is %q, want text or json", format)
	}
	return nil
}

// writeChecks prints a line a check, and in text its mend on a line below.
func writeChecks(w io.Writer, format string, checks []check) error {
	if format == "json" {
		return writeJSONLines(w, checks)
	}
	width := 0
	for _, c := range checks {
		width = max(width, len(c.Check))
	}
	for _, c := range checks {
		if _, err := fmt.Fprintf(w, "%-4s  %-*s  %s\n", c.Status, width, c.Check, printable(c.Detail)); err != nil {
			return err
		}
		if c.Mend == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "      %-*s  mend: %s\n", width, "", printable(c.Mend)); err != nil {
			return err
		}
	}
	return nil
}

func writeJSONLines[T any](w io.Writer, rows []T) error {
	out := json.NewEncoder(w)
	for _, row := range rows {
		if err := out.Encode(row); err != nil {
			return err
		}
	}
	return nil
}

// failed counts the checks that did not pass.
func failed(checks []check) int {
	n := 0
	for _, c := range checks {
		if c.Status == statusFail {
			n++
		}
	}
	return n
}

// printable makes one line of what a plugin says about itself, without characters that control the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}
