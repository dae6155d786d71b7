-- Queue or schedule a failed job again, as RQ does for one with retries left, if this execution still
-- holds it. RQ's own way writes the status before the rest: a kill in between loses the job.
-- ARGV: those of end_execution.lua, when: as put_back takes it; the field that counts tries, and its new value;
--       results_ttl_s ('' keeps), then field, value, ... of the entry in rq:results, if there is one
-- Returns as finish.lua does; such a job has not ended, so its dependents wait on.
local when, ttl = ARGV[8], ARGV[11]
local reply = not_held()
if reply then return reply end

write_run(ARGV[9], ARGV[10])
if #ARGV > 11 then
  add_result(12)
  expire_results(ttl)
end
put_back(when)
leave_slot(when)
count('failed_job_count')
let_go(queue, id, eid)
return 'done'
