package docs

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the tables of fields in docs/connectors anew")

// TestConnectorPages: the tables of fields and of numbers are those of the plugins.
func TestConnectorPages(t *testing.T) {
	tables := map[string]string{"offloading.md": "offload", "aibrix.md": "aibrix", "lmcache.md": "lmcache", "remote.md": "remote", "nixl.md": "nixl", "p2pnccl.md": "p2pnccl"}
	between := regexp.MustCompile(`(?s)(<!-- fields -->\n).*?(<!-- end -->)`)
	for name, plugin := range tables {
		path := "connectors/" + name
		want := fieldTable(t, schemaOf(t, plugin))
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

// schemaOf is what a plugin says of its config.
func schemaOf(t *testing.T, plugin string) json.RawMessage {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "run", "-buildvcs=false", "../plugins/"+plugin, "--manifest").Output()
	require.NoError(t, err)
	var manifest struct {
		Schema json.RawMessage `json:"config_schema"`
	}
	require.NoError(t, json.Unmarshal(out, &manifest))
	return manifest.Schema
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
