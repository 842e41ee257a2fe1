package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// addLogLevel adds --log-level, whose value setLog reads.
func addLogLevel(cmd *cobra.Command, level *string) {
	cmd.Flags().StringVar(level, "log-level", "info", "debug, info, warn or error")
}

// setLog makes the default logger: text on a terminal, else JSON, to w.
func setLog(w io.Writer, level string) error {
	var least slog.Level
	if err := least.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return fmt.Errorf("--log-level is %q, want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: least}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		slog.SetDefault(slog.New(slog.NewTextHandler(w, options)))
		return nil
	}
	slog.SetDefault(slog.New(slog.NewJSONHandler(w, options)))
	return nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
