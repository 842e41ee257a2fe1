// Command write renews verify/names/testdata/names.txt. Run it at the root of the repository.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/kvport/kvport/verify/names"
)

func main() {
	tree := flag.String("tree", "", "read another work tree, and print its names")
	lines := flag.Bool("lines", false, "print the lines of Go by folder instead")
	flag.Parse()
	if err := run(*tree, *lines); err != nil {
		fmt.Fprintln(os.Stderr, "write:", err)
		os.Exit(1)
	}
}

func run(tree string, lines bool) error {
	root := tree
	if root == "" {
		root = "."
	}
	if lines {
		return names.WriteLines(os.Stdout, root)
	}
	list, err := names.Collect(context.Background(), root)
	if err != nil {
		return err
	}
	if tree != "" {
		_, err = os.Stdout.WriteString(names.Format(list))
		return err
	}
	return os.WriteFile("verify/names/testdata/names.txt", []byte(names.Format(list)), 0o644)
}
