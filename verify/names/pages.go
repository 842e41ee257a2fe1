package names

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// pageNames reads the pages that other tests keep true: metrics, rules, acceptance.
func pageNames(_ context.Context, root string) (list []Name, err error) {
	for page, names := range map[string]func(string) []Name{
		"docs/metrics.md": metrics, "docs/spec/README.md": rules, "docs/spec/vllm-invariants.md": invariants, "docs/acceptance.md": acceptance,
	} {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			return nil, err
		}
		found := names(string(text))
		if len(found) == 0 {
			return nil, fmt.Errorf("%s has none of the names that are looked for: %w", page, errForm)
		}
		list = append(list, found...)
	}
	return list, nil
}

// metrics are the rows of the tables that TestMetricsPage writes.
func metrics(page string) (list []Name) {
	for _, m := range regexp.MustCompile("(?m)^\\| `(kvport_\\w+)` \\| (\\w+) \\| ([^|]*) \\|").FindAllStringSubmatch(page, -1) {
		list = append(list, Name{"metric", m[1], strings.TrimSpace(m[2] + " " + m[3])})
	}
	return list
}

// rules are the headings of the spec, with their owners.
func rules(page string) (list []Name) {
	for _, m := range regexp.MustCompile(`(?m)^### (\S+)\n(?:[^#\n-].*\n)*- owner: (.*)$`).FindAllStringSubmatch(page, -1) {
		list = append(list, Name{"rule", m[1], "owner " + m[2]})
	}
	return list
}

// invariants are those of vLLM's API, with whoever has to keep them: the page's tables before its planted violations.
func invariants(page string) (list []Name) {
	page, _, _ = strings.Cut(page, "\n## Planted violations\n")
	for _, m := range regexp.MustCompile(`(?m)^\| (\d+) \| [^|]* \| ([^|]*) \|`).FindAllStringSubmatch(page, -1) {
		list = append(list, Name{"rule", "vLLM invariant " + m[1], "duty of " + m[2]})
	}
	return list
}

var (
	codeSpan = regexp.MustCompile("`([^`]+)`")
	runnable = regexp.MustCompile(`^Test|(^| )(go test|make|bin/kvport|python3) `)
)

// acceptance are the commands in the rows of tables that have a column of commands.
func acceptance(page string) (list []Name) {
	column := -1 // of the commands in this table
	for line := range strings.Lines(strings.ReplaceAll(page, `\|`, "\x00")) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 {
			column = -1
			continue
		}
		if column < 0 {
			column = slices.IndexFunc(cells, func(c string) bool { return strings.HasPrefix(c, " command") })
			continue
		}
		for _, m := range codeSpan.FindAllStringSubmatch(cells[column], -1) {
			for command := range strings.SplitSeq(strings.ReplaceAll(m[1], "\x00", "|"), ";") {
				if command = strings.TrimSpace(command); runnable.MatchString(command) {
					list = append(list, Name{Section: "acceptance", Name: command})
				}
			}
		}
	}
	return list
}

// protoNames reads the golden descriptor of the protocol.
func protoNames(_ context.Context, root string) (list []Name, err error) {
	data, err := os.ReadFile(filepath.Join(root, "proto", "kvport", "v1", "v1.binpb"))
	if err != nil {
		return nil, err
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(data, &set); err != nil {
		return nil, err
	}
	add := func(name, format string, args ...any) {
		list = append(list, Name{"proto", name, fmt.Sprintf(format, args...)})
	}
	kind := func(t fmt.Stringer) string {
		_, kind, _ := strings.Cut(t.String(), "_")
		return strings.ToLower(kind)
	}
	for _, f := range set.GetFile() {
		for _, m := range f.GetMessageType() {
			add(m.GetName(), "message")
			for _, field := range m.GetField() {
				add(m.GetName()+"."+field.GetName(), "%d %s %s%s", field.GetNumber(), kind(field.GetLabel()), kind(field.GetType()), field.GetTypeName())
			}
		}
		for _, e := range f.GetEnumType() {
			for _, v := range e.GetValue() {
				add(e.GetName()+"."+v.GetName(), "%d", v.GetNumber())
			}
		}
		for _, s := range f.GetService() {
			for _, m := range s.GetMethod() {
				add(s.GetName()+"."+m.GetName(), "%s (stream %t) %s (stream %t)", m.GetInputType(), m.GetClientStreaming(), m.GetOutputType(), m.GetServerStreaming())
			}
		}
	}
	return list, nil
}
