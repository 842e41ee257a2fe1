package docs

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connectors/aibrix"
	"github.com/kvport/kvport/connectors/lmcache"
	"github.com/kvport/kvport/connectors/offload"
	"github.com/kvport/kvport/connectors/remote"
	"github.com/kvport/kvport/sdk"
)

var update = flag.Bool("update", false, "write the tables of fields in docs/connectors anew")

// TestConnectorPages: the tables of fields and of numbers are those of the code.
func TestConnectorPages(t *testing.T) {
	tables := map[string]string{
		"offloading.md": fieldTable(t, sdk.SchemaOf[offload.Config]()), "aibrix.md": fieldTable(t, sdk.SchemaOf[aibrix.Config]()),
		"lmcache.md": fieldTable(t, sdk.SchemaOf[lmcache.Config]()), "remote.md": fieldTable(t, sdk.SchemaOf[remote.Config]()),
	}
	between := regexp.MustCompile(`(?s)(<!-- fields -->\n).*?(<!-- end -->)`)
	for name, want := range tables {
		path := "connectors/" + name
		page := read(t, []string{path})
		require.Len(t, between.FindAllString(page, -1), 1, "%s needs one <!-- fields --> and <!-- end -->", path)
		now := between.ReplaceAllString(page, "${1}"+strings.ReplaceAll(want, "$", "$$")+"${2}")
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(now), 0o644))
			continue
		}
		require.Equal(t, now, page, "run go test ./docs -run ConnectorPages -update")
	}
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
	// Fields stand in the order of the schema.
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
