// Command write renews the tables and plots of docs/benchmarks.md from docs/benchmarks/*.jsonl.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvport/kvport/verify/bench/report"
)

func main() {
	docs := "docs"
	if len(os.Args) > 1 {
		docs = os.Args[1]
	}
	if err := write(docs); err != nil {
		fmt.Fprintln(os.Stderr, "write:", err)
		os.Exit(1)
	}
}

func write(docs string) error {
	files, err := report.Files(docs)
	if err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(docs, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
