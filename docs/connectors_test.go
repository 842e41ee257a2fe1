package docs

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/fixture"
)

var update = flag.Bool("update", false, "write the tables of fields in docs/connectors again")

// TestConnectorPages: every plugin has a page, which its fixture names. The tables of fields in these pages are those of the
// plugins' schemas; a page in docs/connectors has one.
func TestConnectorPages(t *testing.T) {
	list, err := fixture.Read(os.DirFS(".."), "plugins/*/fixture.json")
	require.NoError(t, err)
	require.NotEmpty(t, list)
	between := regexp.MustCompile(`(?s)(<!-- fields -->\n).*?(<!-- end -->)`)
	pages := map[string]bool{}
	for _, f := range list {
		name, schema := manifestOf(t, f.Folder)
		require.Equal(t, f.Connector, name, "%s/fixture.json", f.Folder)
		page := read(t, []string{f.Page})
		require.Contains(t, page, name, f.Page)
		pages[f.Page] = true
		if !strings.HasPrefix(f.Page, "connectors/") {
			continue
		}
		want := fieldTable(t, schema)
		require.Len(t, between.FindAllString(page, -1), 1, "%s needs one <!-- fields --> and <!-- end -->", f.Page)
		now := between.ReplaceAllString(page, "${1}"+strings.ReplaceAll(want, "$", "$$")+"${2}")
		if *update {
			require.NoError(t, os.WriteFile(f.Page, []byte(now), 0o644))
			continue
		}
		require.Equal(t, now, page, "run go test ./docs -run ConnectorPages -update")
	}
	found, err := filepath.Glob("connectors/*.md")
	require.NoError(t, err)
	for _, page := range found {
		require.Contains(t, pages, filepath.ToSlash(page), "no plugin's fixture names this page")
	}
}

// manifestOf is what a plugin says its name and its config are.
func manifestOf(t *testing.T, folder string) (name string, schema json.RawMessage) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "run", "-buildvcs=false", "../"+folder, "--manifest").Output()
	require.NoError(t, err)
	var manifest struct {
		Name   string          `json:"name"`
		Schema json.RawMessage `json:"config_schema"`
	}
	require.NoError(t, json.Unmarshal(out, &manifest))
	return manifest.Name, manifest.Schema
}

// fieldTable is a config's schema as a table, without the fields that have no effect.
func fieldTable(t *testing.T, schema json.RawMessage) string {
	t.Helper()
	type property struct {
		Type        string          `json:"type"`
		Description string          `json:"description"`
		Default     json.RawMessage `json:"default"`
		Minimum     json.Number     `json:"minimum"`
		Maximum     json.Number     `json:"maximum"`
		Enum        []string        `json:"enum"`
	}
	var s struct {
		Properties map[string]property `json:"properties"`
	}
	require.NoError(t, json.Unmarshal(schema, &s))
	require.NotEmpty(t, s.Properties)
	// Fields are listed in the order of the schema.
	order := make([]string, 0, len(s.Properties))
	for name := range s.Properties {
		order = append(order, name)
	}
	at := func(name string) int { return strings.Index(string(schema), fmt.Sprintf("%q", name)) }
	slices.SortFunc(order, func(a, b string) int { return at(a) - at(b) })
	typed := slices.ContainsFunc(order, func(name string) bool { return s.Properties[name].Type != "" })
	var out strings.Builder
	if typed {
		out.WriteString("| Field | Values | Default | Meaning |\n|---|---|---|---|\n")
	} else {
		out.WriteString("| Field | Meaning |\n|---|---|\n")
	}
	for _, name := range order {
		p := s.Properties[name]
		if strings.Contains(strings.ToLower(p.Description), "no effect") {
			continue
		}
		if !typed {
			fmt.Fprintf(&out, "| `%s` | %s |\n", name, p.Description)
			continue
		}
		values := p.Type
		switch {
		case len(p.Enum) > 0:
			values = strings.Join(p.Enum, ", ")
		case p.Minimum != "" && p.Maximum != "":
			values += fmt.Sprintf(" %s..%s", p.Minimum, p.Maximum)
		case p.Minimum != "":
			values += fmt.Sprintf(" from %s", p.Minimum)
		}
		fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", name, values, strings.Trim(string(p.Default), `"`), strings.ReplaceAll(p.Description, "|", `\|`))
	}
	return out.String()
}
