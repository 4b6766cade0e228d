
function __fish_embark_runs
    for folder in runs/*/
        string replace -r '^runs/(.*)/$' '$1' $folder
    end
end

# Files are completed too: no line here says otherwise.
