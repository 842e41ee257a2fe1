package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/host"
)

func newSchema() *cobra.Command {
	var folders []string
	cmd := &cobra.Command{
		Use:   "schema [CONNECTOR]",
		Short: "Print the JSON Schema of --kv-transfer-config, or of one connector's kv_connector_extra_config",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var plugins []*host.Manifest
			for _, found := range host.List(cmd.Context(), pluginFolders(folders)) {
				if found.Manifest != nil {
					plugins = append(plugins, found.Manifest)
				}
			}
			schema, err := host.ConfigSchema(plugins, append(args, "")[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", schema)
			return fail(err)
		},
	}
	addPluginPath(cmd.Flags(), &folders)
	return cmd
}
